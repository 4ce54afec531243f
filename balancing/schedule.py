"""The schedule of a mini-batch: which micro-batches run at the same time, and on which rank.

    sequences --> Karmarkar-Karp, refined (dealing.py) --> at workload / ranks? --> order of steps --> ranks
                                                           no: try more, keep the fastest
    more: fill long steps first (step_filling.py), start from longest first (dealing.py), exchange between steps
    (step_exchange.py)

All ranks wait for the heaviest micro-batch of a micro-step, because they reduce gradients or gather parameters there.
So the time of a mini-batch is the sum over its steps of the heaviest micro-batch. No schedule takes less than
workload / ranks, nor less than long sequences force (`lower_bounds.step_time_bound`).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from balancing.dealing import Order, Request, Schedule, Start, checked_steps, computed_weights, deal, from_longest_first
from balancing.grouping import Floats, Grouping, Integers
from balancing.packing import CountRule, pack_in_order
from balancing.pipeline_order import small_ends
from balancing.step_exchange import exchange_between_steps
from balancing.step_filling import GOOD_ENOUGH, fill_long_steps_first, time_bound

AT_THE_BOUND = 5e-5
"""A first schedule within this share of workload / ranks is final."""
FAR_FROM_THE_BOUND = 5e-3
"""Above this share over the lower bound, other starts are tried, which take longer than everything before."""
FEW_STEPS = 3
"""Up to this many micro-steps, none prolonged by long sequences, a round of exchanges between them comes first."""


def schedule_evenly(sizes: Integers, weights: Floats, request: Request) -> Schedule:
    """The fastest schedule found over all ranks and micro-steps together.

    sizes: int64 [n], tokens. weights: float64 [n]. Both in descending order of weight, then of size.
    Raises CountError if the counts of `request` cannot be kept.
    """
    best = deal(sizes, weights, request)
    if not request.caps.padded and len(weights) >= best.grouping.count:
        best = _or_faster(best, sizes, weights, request)
    weights = computed_weights(best.grouping, weights, request)
    return arranged(best, weights, request.order)


def arranged(schedule: Schedule, weights: Floats, order: Order) -> Schedule:
    """The schedule with its steps in `order`, and the micro-batches of each step on the ranks that have least so far.

    weights: float64 [n], as computed.
    """
    return to_ranks(_in_order(schedule, weights, order), weights)


def _or_faster(first: Schedule, sizes: Integers, weights: Floats, request: Request) -> Schedule:
    """The first schedule if its time is near workload / ranks, else the fastest of several."""
    if first.time(weights) <= float(weights.sum()) / request.ranks * (1 + AT_THE_BOUND):
        return first
    least = time_bound(sizes, weights, request, first.steps)
    bound, enough = least.time, least.time * (1 + GOOD_ENOUGH)
    if first.steps <= FEW_STEPS and least.long_steps == 0:
        first = exchange_between_steps(first, sizes, weights, request, enough, rounds=1)
    best = fill_long_steps_first(sizes, weights, request, first, bound)
    if best.time(weights) <= bound * (1 + FAR_FROM_THE_BOUND):
        return best
    other = from_longest_first(sizes, weights, request, first.steps) if first.start == "karmarkar_karp" else None
    if other is not None:
        best = _faster(best, fill_long_steps_first(sizes, weights, request, other, bound), weights)
        first = _faster(first, other, weights)
    found = exchange_between_steps(best, sizes, weights, request, enough)
    if first is not best:
        found = _faster(found, exchange_between_steps(first, sizes, weights, request, enough), weights)
    return found


def _faster(one: Schedule, other: Schedule, weights: Floats) -> Schedule:
    return other if other.time(weights) < one.time(weights) else one


def schedule_in_order(sizes: Integers, request: Request) -> Schedule:
    """The given order in runs of equal count, one for each rank, cut under the caps."""
    chunks = np.array_split(np.arange(len(sizes)), request.ranks)
    needed = max(len(pack_in_order(sizes[chunk], request.caps, CountRule())) for chunk in chunks if len(chunk))
    steps = checked_steps(needed, min(len(chunk) for chunk in chunks), len(sizes), request)
    columns = []
    for chunk in chunks:
        filled = CountRule(max(1, min(steps, len(chunk))))
        runs = pack_in_order(sizes[chunk], request.caps, filled) if len(chunk) else []
        columns.append([chunk[start:stop] for start, stop in runs])
    return side_by_side(columns, steps, len(sizes), "none")


def side_by_side(columns: Sequence[Sequence[Integers]], steps: int, sequences: int, start: Start) -> Schedule:
    """Each rank's micro-batches, at most `steps`, in the order given; no step is empty on all ranks."""
    group_of = np.empty(sequences, np.int64)
    first = 0  # a rank with fewer micro-batches than steps starts where the one before it ended
    for rank, column in enumerate(columns):
        for step, rows in zip(sorted((first + i) % steps for i in range(len(column))), column, strict=True):
            group_of[rows] = step * len(columns) + rank
        first = (first + len(column)) % steps
    return Schedule(Grouping(group_of, steps * len(columns)), steps, start)


def _in_order(schedule: Schedule, weights: Floats, order: Order) -> Schedule:
    """Heaviest step first; `small_ends` puts light ones at both ends, which shortens the bubbles of a pipeline."""
    times = schedule.loads(weights).max(axis=1)
    return with_steps(schedule, small_ends(times) if order == "small_ends" else np.argsort(-times, kind="stable"))


def with_steps(schedule: Schedule, steps: Integers) -> Schedule:
    """The schedule whose i-th micro-step is number `steps[i]` of the given one; steps: int64 [steps]."""
    ranks = schedule.grouping.count // schedule.steps
    numbers = np.argsort(steps)[:, None] * ranks + np.arange(ranks)
    return replace(schedule, grouping=schedule.grouping.renumbered(numbers.ravel(), schedule.grouping.count))


def to_ranks(schedule: Schedule, weights: Floats) -> Schedule:
    """Within each step, give the heaviest micro-batch to the rank with the least work so far."""
    loads = schedule.loads(weights)
    steps, ranks = loads.shape
    so_far, numbers = np.zeros(ranks), np.empty((steps, ranks), np.int64)
    for step in range(steps):
        receivers = np.argsort(so_far, kind="stable")
        heaviest = np.argsort(-loads[step], kind="stable")
        numbers[step, heaviest] = step * ranks + receivers
        so_far[receivers] += loads[step, heaviest]
    return replace(schedule, grouping=schedule.grouping.renumbered(numbers.ravel(), schedule.grouping.count))
