"""Compute lower bounds that plans are measured against.

    fewest_bins        number of micro-batches       the caps (Martello and Toth 1990)
    mean_bound         heaviest of k sets            the mean, or the heaviest weight
    step_time_bound    time of a mini-batch          workload / ranks, or steps that long sequences prolong

No plan within the caps is better, whatever algorithm made it.
"""

from dataclasses import dataclass

import numpy as np

from balancing.basics.grouping import Floats, Integers

MOST_TOGETHER = 4
"""`step_time_bound` considers up to this many long sequences in one micro-batch."""


def fewest_bins(sizes: Integers, capacity: int, max_items: int) -> int:
    """Bound the number of bins of `capacity` tokens and `max_items` items: max(ceil(n / max_items), L2)."""
    return max(-(-len(sizes) // max_items), _martello_toth(sizes, capacity))


def _martello_toth(sizes: Integers, capacity: int) -> int:
    """Compute the bound L2 of Martello and Toth (1990).

    For every threshold a <= capacity / 2: items above capacity - a are alone, items above half the capacity
    are in different bins, and items of at least a share the room that these leave. Threshold 0 gives L1 =
    ceil(sum/capacity).
    """
    ascending = np.sort(sizes)
    total_before = np.concatenate([[0], np.cumsum(ascending)])
    # Items above half start here.
    half = int(np.searchsorted(ascending, capacity // 2, side="right"))
    thresholds = np.concatenate([[0], np.unique(ascending[:half])])
    alone_start = np.maximum(
        np.searchsorted(ascending, capacity - thresholds, side="right"), half
    )
    large = alone_start - half
    large_sum = total_before[alone_start] - total_before[half]
    small_start = np.searchsorted(ascending, thresholds, side="left")
    small_sum = total_before[half] - total_before[small_start]
    overflow = np.maximum(0, -(-(small_sum - (large * capacity - large_sum)) // capacity))
    return int((len(sizes) - half + overflow).max())


def mean_bound(weights: Floats, k: int) -> float:
    """Return the heaviest weight or the mean, rounded up for whole numbers. weights: float64 [n],
    descending.
    """
    mean = float(weights.sum()) / k
    return max(
        float(np.ceil(mean)) if (weights == np.floor(weights)).all() else mean,
        float(weights[0]),
    )


@dataclass(frozen=True)
class StepTimeBound:
    """time: no plan takes less. long_steps: micro-steps that the bound counts as prolonged by
    long sequences.
    """

    time: float
    long_steps: int


def step_time_bound(
    sizes: Integers,
    weights: Floats,
    *,
    ranks: int,
    steps: int,
    max_tokens: int,
    max_sequences: int,
) -> StepTimeBound:
    """Bound a mini-batch's time: the sum over its synchronous micro-steps of the heaviest micro-batch.

    sizes: int64 [n], tokens, each in 1..max_tokens. weights: float64 [n], workload. steps: micro-steps of the
    plan. The bound is the maximum over j = 0..steps of

        v_1 + ... + v_j + (W - K_j) / ranks

    W: the total workload. v_i: the least time of the i-th longest micro-step (`minimum_step_times`). K_j: the
    most workload that j * ranks micro-batches can hold (`most_workload`). The rest is computed at best
    evenly. Assumes the packed layout, which is never slower than the padded one.
    """
    forced = minimum_step_times(sizes, weights, ranks, steps, max_tokens, max_sequences)
    held = most_workload(sizes, weights, np.arange(len(forced) + 1) * ranks, max_tokens)
    return prolonged(forced, float(weights.sum()), held, ranks)


def prolonged(forced: Floats, total: float, held: Floats, ranks: int) -> StepTimeBound:
    """Maximise forced[0] + ... + forced[j - 1] + (total - held[j]) / ranks over j. held: float64 [forced +
    1].
    """
    times = (
        np.concatenate([[0.0], np.cumsum(forced)]) + np.maximum(total - held, 0.0) / ranks
    )
    long_steps = int(np.argmax(times))
    return StepTimeBound(float(times[long_steps]), long_steps)


def minimum_step_times(
    sizes: Integers,
    weights: Floats,
    ranks: int,
    steps: int,
    max_tokens: int,
    max_sequences: int,
    most_together: int = MOST_TOGETHER,
) -> Floats:
    """Bound the times of the longest micro-steps: v_1 >= v_2 >= ... > 0, at most `steps` values.

    At most m of the h heaviest sequences fit in a micro-batch, m = max_tokens // the shortest of them. If x
    of the B = ranks * steps micro-batches hold more than k of them, then h <= k * (B - x) + m * x. So x is at
    least (h - k * B) / (m - k). These x micro-batches occupy at least x / ranks micro-steps, and each weighs
    at least as much as the k + 1 lightest of the h heaviest sequences. With k = 0 a single long sequence
    prolongs a step.
    most_together: k is less.
    """
    order = np.argsort(-weights, kind="stable")
    together = np.minimum(max_tokens // np.minimum.accumulate(sizes[order]), max_sequences)
    sums = np.concatenate([[0.0], np.cumsum(weights[order])])
    heaviest = np.arange(1, len(order) + 1)
    levels = np.zeros(steps)
    for over in range(most_together):
        crowded = -(-(heaviest - over * ranks * steps) // np.maximum(together - over, 1))
        steps_of_them = np.maximum.accumulate(-(-crowded // ranks))
        forced = np.arange(1, min(steps, int(steps_of_them[-1])) + 1)
        first = np.maximum(np.searchsorted(steps_of_them, forced), over)
        levels[: len(forced)] = np.maximum(
            levels[: len(forced)], sums[first + 1] - sums[first - over]
        )
    return levels[levels > 0]


def most_workload(
    sizes: Integers, weights: Floats, micro_batches: Integers, max_tokens: int
) -> Floats:
    """Return the most workload that fits in each number of micro-batches: fractional knapsack (Dantzig 1957).

    A micro-batch holds at most one sequence above half the cap. If workload per token grows with length, the
    best choice is the longest of these, one per micro-batch, filled up with others.
    """
    order = np.lexsort((-sizes, -weights / sizes))
    tokens = sizes[order]
    workload = weights[order]
    capacity = micro_batches.astype(np.float64) * max_tokens
    if (np.diff(tokens) > 0).any():
        return _cut_off(tokens, workload, capacity)
    # The sequences before it are above half the cap.
    large = int(np.searchsorted(-tokens, -(max_tokens // 2)))
    large_counts = np.minimum(micro_batches, large)
    of_large = np.concatenate([[0.0], np.cumsum(workload[:large])])[large_counts]
    room = capacity - np.concatenate([[0], np.cumsum(tokens[:large])])[large_counts]
    filled: Floats = of_large + _cut_off(tokens[large:], workload[large:], room)
    return filled


def _cut_off(tokens: Integers, workload: Floats, capacity: Floats) -> Floats:
    used = np.concatenate([[0], np.cumsum(tokens)])
    done = np.concatenate([[0.0], np.cumsum(workload)])
    filled: Floats = np.interp(capacity, used, done)
    return filled
