"""Which micro-batches run at the same time, and on which rank.

    sequences of a mini-batch --> dealt from Karmarkar-Karp (dealing.py) --> at the bound? --> order of steps --> ranks
                                                                             no: other starts, the fastest is kept
    other starts: long sequences first, with others (levels.py); longest first (dealing.py); work moved between
    micro-steps (lowering.py)

All ranks wait for the heaviest micro-batch of a micro-step (gradients or gathered parameters meet there), so the time
of a mini-batch is the sum over its steps of the heaviest, and the best that can be hoped for is workload / ranks, or
what long sequences force (`bounds.step_time_bound`).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from balancing.dealing import Order, Request, Schedule, Start, checked_steps, computed, dealt, from_longest_first
from balancing.grouping import Floats, Grouping, Integers
from balancing.levels import GOOD_ENOUGH, filled_first, time_bound
from balancing.lowering import lowered
from balancing.packing import CountRule, pack_in_order

AT_THE_BOUND = 5e-5
"""A schedule from Karmarkar-Karp within this of workload / ranks, relatively, is taken as it is."""
FAR_FROM_THE_BOUND = 5e-3
"""A schedule further than this from the bound is worth more starts, which take longer than all before them."""


def schedule_evenly(sizes: Integers, weights: Floats, request: Request) -> Schedule:
    """All micro-batches of the mini-batch, over all ranks, planned at once: from Karmarkar-Karp, or a faster start.

    sizes: int64 [n], tokens. weights: float64 [n]. Both in descending order of weight, then of size.
    Raises CountError where the counts of `request` cannot be kept.
    """
    best = dealt(sizes, weights, request)
    if not request.caps.padded and len(weights) >= best.grouping.count:
        best = _or_faster(best, sizes, weights, request)
    weights = computed(best.grouping, weights, request)
    return _to_ranks(_in_order(best, weights, request.order), weights)


def _or_faster(first: Schedule, sizes: Integers, weights: Floats, request: Request) -> Schedule:
    """The first schedule if it is at the bound, else the fastest of those from all starts."""
    if first.time(weights) <= float(weights.sum()) / request.ranks * (1 + AT_THE_BOUND):
        return first
    bound = time_bound(sizes, weights, request, first.steps).time
    best = filled_first(sizes, weights, request, first, bound)
    if best.time(weights) <= bound * (1 + FAR_FROM_THE_BOUND):
        return best
    other = from_longest_first(sizes, weights, request, first.steps) if first.start == "karmarkar_karp" else None
    if other is not None:
        best = _faster(best, filled_first(sizes, weights, request, other, bound), weights)
        first = _faster(first, other, weights)
    enough = bound * (1 + GOOD_ENOUGH)
    found = lowered(best, sizes, weights, request, enough)
    return found if first is best else _faster(found, lowered(first, sizes, weights, request, enough), weights)


def _faster(one: Schedule, other: Schedule, weights: Floats) -> Schedule:
    return other if other.time(weights) < one.time(weights) else one


def schedule_in_order(sizes: Integers, request: Request) -> Schedule:
    """The given order, one run of equal count for each rank, each cut where a cap is met."""
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
    """Micro-batches of each rank, at most `steps`, each in the order given; no step is empty on all ranks."""
    group_of = np.empty(sequences, np.int64)
    first = 0  # of a rank with fewer micro-batches than steps: where the rank before it ended, so that no step is empty
    for rank, column in enumerate(columns):
        for step, rows in zip(sorted((first + i) % steps for i in range(len(column))), column, strict=True):
            group_of[rows] = step * len(columns) + rank
        first = (first + len(column)) % steps
    return Schedule(Grouping(group_of, steps * len(columns)), steps, start)


def _in_order(schedule: Schedule, weights: Floats, order: Order) -> Schedule:
    """Heaviest step first; or, for pipelines, small ones at both ends where they keep the bubbles short."""
    descending = np.argsort(-schedule.loads(weights).max(axis=1), kind="stable")
    steps = descending if order == "descending" else np.concatenate([descending[1::2][::-1], descending[0::2]])
    ranks = schedule.grouping.count // schedule.steps
    numbers = np.argsort(steps)[:, None] * ranks + np.arange(ranks)
    return replace(schedule, grouping=schedule.grouping.renumbered(numbers.ravel(), schedule.grouping.count))


def _to_ranks(schedule: Schedule, weights: Floats) -> Schedule:
    """Within each step the heaviest micro-batch goes to the rank with least so far."""
    loads = schedule.loads(weights)
    steps, ranks = loads.shape
    so_far, numbers = np.zeros(ranks), np.empty((steps, ranks), np.int64)
    for step in range(steps):
        receivers = np.argsort(so_far, kind="stable")
        heaviest = np.argsort(-loads[step], kind="stable")
        numbers[step, heaviest] = step * ranks + receivers
        so_far[receivers] += loads[step, heaviest]
    return Schedule(schedule.grouping.renumbered(numbers.ravel(), schedule.grouping.count), steps, schedule.start)
