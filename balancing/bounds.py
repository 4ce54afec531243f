"""How few micro-batches, and how little time, can do: bounds from below."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_TOGETHER = 4
"""Long sequences in one micro-batch up to which the bound on time counts them."""


def fewest_bins(sizes: NDArray[np.int64], capacity: int, max_items: int) -> int:
    """A lower bound on bins of `capacity` tokens and `max_items` items: the larger of ceil(n / max_items) and L2.

    sizes: int64 [n], each in 1..capacity.
    """
    return max(-(-len(sizes) // max_items), _martello_toth(sizes, capacity))


def _martello_toth(sizes: NDArray[np.int64], capacity: int) -> int:
    """The bound L2 of Martello and Toth (1990).

    For every threshold a <= capacity / 2: items above capacity - a are alone, items above half the capacity are in
    different bins, and items of at least a must share what the latter leave. Threshold 0 gives L1 = ceil(sum/capacity).
    """
    ascending = np.sort(sizes)
    total_before = np.concatenate([[0], np.cumsum(ascending)])
    half = int(np.searchsorted(ascending, capacity // 2, side="right"))  # items above half start here
    thresholds = np.concatenate([[0], np.unique(ascending[:half])])
    alone_start = np.maximum(np.searchsorted(ascending, capacity - thresholds, side="right"), half)
    large = alone_start - half
    large_sum = total_before[alone_start] - total_before[half]
    small_start = np.searchsorted(ascending, thresholds, side="left")
    small_sum = total_before[half] - total_before[small_start]
    overflow = np.maximum(0, -(-(small_sum - (large * capacity - large_sum)) // capacity))
    return int((len(sizes) - half + overflow).max())


@dataclass(frozen=True)
class StepTimeBound:
    """No plan takes less `time`. long_steps: how many micro-steps long sequences hold up to reach it, 0 for none."""

    time: float
    long_steps: int


def step_time_bound(
    sizes: NDArray[np.int64],
    weights: NDArray[np.float64],
    *,
    ranks: int,
    steps: int,
    max_tokens: int,
    max_sequences: int,
) -> StepTimeBound:
    """A lower bound on a mini-batch's time: the sum over its synchronous micro-steps of the heaviest micro-batch.

    sizes: int64 [n], tokens, each in 1..max_tokens. weights: float64 [n], workload. steps: micro-steps of the plan.
    The time is in the unit of the weights. For j = 0..steps it is at least

        v_1 + ... + v_j + (W - K_j) / ranks

    W: all workload, so j = 0 is workload / ranks. v_i: what the i-th longest micro-step lasts at least, because of
    long sequences (`forced_levels`). K_j: the most workload that j * ranks micro-batches hold (`_most_workload`).
    What the j longest micro-steps cannot do, the others do, at best evenly.
    Caps are those of the packed layout; the padded one is no faster.
    """
    forced = forced_levels(sizes, weights, ranks, steps, max_tokens, max_sequences)
    micro_batches = np.arange(len(forced) + 1) * ranks
    left = np.maximum(weights.sum() - _most_workload(sizes, weights, micro_batches, max_tokens), 0.0)
    times = np.concatenate([[0.0], np.cumsum(forced)]) + left / ranks
    long_steps = int(np.argmax(times))
    return StepTimeBound(float(times[long_steps]), long_steps)


def forced_levels(
    sizes: NDArray[np.int64],
    weights: NDArray[np.float64],
    ranks: int,
    steps: int,
    max_tokens: int,
    max_sequences: int,
) -> NDArray[np.float64]:
    """v_1 >= v_2 >= ..., at most `steps`: what the i-th longest micro-step lasts at least.

    Of the h heaviest sequences at most m fit in a micro-batch, m = max_tokens // the smallest of them. Where no more
    than x of all B = ranks * steps micro-batches hold over k of them, h <= k * (B - x) + m * x; so x is at least
    (h - k * B) / (m - k), and that many micro-batches lie in x / ranks micro-steps or more. Each holds k + 1 of the h
    heaviest, at the least the k + 1 lightest of these. k = 0: one long sequence holds a step up.
    """
    order = np.argsort(-weights, kind="stable")
    together = np.minimum(max_tokens // np.minimum.accumulate(sizes[order]), max_sequences)
    before = np.concatenate([[0.0], np.cumsum(weights[order])])
    heaviest = np.arange(1, len(order) + 1)
    levels = np.zeros(steps)
    for over in range(MOST_TOGETHER):
        crowded = -(-(heaviest - over * ranks * steps) // np.maximum(together - over, 1))
        steps_of_them = np.maximum.accumulate(-(-crowded // ranks))
        forced = np.arange(1, min(steps, int(steps_of_them[-1])) + 1)
        first = np.maximum(np.searchsorted(steps_of_them, forced), over)
        levels[: len(forced)] = np.maximum(levels[: len(forced)], before[first + 1] - before[first - over])
    return levels[levels > 0]


def _most_workload(
    sizes: NDArray[np.int64], weights: NDArray[np.float64], micro_batches: NDArray[np.int64], max_tokens: int
) -> NDArray[np.float64]:
    """The most workload in so many micro-batches, the last sequence cut (Dantzig 1957: the densest first).

    Of sequences above half the cap each micro-batch holds at most one. Where longer sequences are denser, as with costs
    that grow faster than lengths, it is best to take as many of these as that, the longest, and to fill up with others.
    """
    order = np.lexsort((-sizes, -weights / sizes))
    tokens, workload = sizes[order], weights[order]
    capacity = micro_batches.astype(np.float64) * max_tokens
    if (np.diff(tokens) > 0).any():
        return _cut_off(tokens, workload, capacity)
    large = int(np.searchsorted(-tokens, -(max_tokens // 2)))  # those before it are above half
    taken = np.minimum(micro_batches, large)
    of_large = np.concatenate([[0.0], np.cumsum(workload[:large])])[taken]
    room = capacity - np.concatenate([[0], np.cumsum(tokens[:large])])[taken]
    filled: NDArray[np.float64] = of_large + _cut_off(tokens[large:], workload[large:], room)
    return filled


def _cut_off(
    tokens: NDArray[np.int64], workload: NDArray[np.float64], capacity: NDArray[np.float64]
) -> NDArray[np.float64]:
    """What fits into each `capacity` in this order, the last sequence cut."""
    used, done = np.concatenate([[0], np.cumsum(tokens)]), np.concatenate([[0.0], np.cumsum(workload)])
    filled: NDArray[np.float64] = np.interp(capacity, used, done)
    return filled
