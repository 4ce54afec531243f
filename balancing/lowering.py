"""Lowering: micro-batches that wait take over work, so that other micro-steps become shorter.

    level of a step: its heaviest rank         wanted: a lower one, but no lower than long sequences force (bounds.py)
    excess of a micro-batch: its weight over the level wanted of its step --> exchanges that even out the excess

Exchanges within a step leave those waiting that share it with a sequence which outweighs them.
"""

import numpy as np

from balancing.bounds import forced_levels
from balancing.dealing import Request, Schedule, evened_steps, in_rows
from balancing.exchange import TOLERANCE, Limits, even_out_arrays
from balancing.grouping import Floats, Grouping, Integers

ROUNDS = 4
"""Times that lower levels are tried."""
EFFORT = 4_000_000
"""Groups and bundles that the exchanges of a round look at, some 20 ms of compiled code."""
BISECTIONS = 20
"""Halvings of what levels are lowered by, until it is found."""


def lowered(schedule: Schedule, sizes: Integers, weights: Floats, request: Request, enough: float) -> Schedule:
    """The schedule, or one whose steps last less together; ends at a time of `enough`."""
    best, lowest, share = schedule, schedule.time(weights), 1.0
    forced = _forced(sizes, weights, request, schedule.steps)
    for _ in range(ROUNDS):
        if lowest <= enough or schedule.steps == 1:
            break
        evened = _evened(best, _wanted(best, weights, forced, share), sizes, weights, request)
        other = in_rows(evened, sizes, weights, request, best.steps, best.start)
        other = evened_steps(other, sizes, weights, request)
        if other.time(weights) < lowest * (1 - TOLERANCE):
            best, lowest = other, other.time(weights)
        else:
            share /= 2
    return best


def _forced(sizes: Integers, weights: Floats, request: Request, steps: int) -> Floats:
    """float64 [steps], descending: what the longest, the second longest, .. step lasts at least."""
    caps, levels = request.caps, np.zeros(steps)
    least = forced_levels(sizes, weights, request.ranks, steps, caps.max_tokens, caps.max_sequences)
    levels[: len(least)] = least
    return levels


def _wanted(schedule: Schedule, weights: Floats, forced: Floats, share: float) -> Floats:
    """float64 [steps]: levels that are together lower by `share` of all waiting, none lower than is forced."""
    loads = schedule.loads(weights)
    levels = loads.max(axis=1)
    waiting = float((levels - loads.mean(axis=1)).sum())
    rank_of_step = np.argsort(np.argsort(-levels, kind="stable"), kind="stable")
    least = np.minimum(levels, forced[rank_of_step])
    low, high = 0.0, float(levels.max())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(levels - least, middle).sum() < share * waiting else (low, middle)
    wanted: Floats = np.maximum(levels - high, least)
    return wanted


def _evened(schedule: Schedule, wanted: Floats, sizes: Integers, weights: Floats, request: Request) -> Grouping:
    """Weights are compared after what a step may last less than the longest has been added to each."""
    missing = np.repeat(wanted.max() - wanted, request.ranks)
    limits = Limits(request.caps.max_tokens, request.caps.max_sequences)
    count, group_of = schedule.grouping.count, schedule.grouping.group_of
    level = float(wanted.max())
    evened = even_out_arrays(group_of, count, weights, sizes, limits, base=missing, target=level, effort=EFFORT)
    return Grouping(evened, count)
