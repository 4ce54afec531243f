"""Exchanges between micro-steps: ranks that would wait take over work from other steps, which become shorter.

    time of each step (its heaviest rank) --> shorter target times, at least their lower bounds (lower_bounds.py)
    weight of a micro-batch - target time of its step = excess --> exchanges that even out the excess

Exchanges within a step cannot help ranks that wait for a long sequence; those between steps can.
"""

import numpy as np

from balancing.dealing import Request, Schedule, deal_into_steps, even_out_within_steps
from balancing.exchange import TOLERANCE, Limits, even_out_arrays
from balancing.grouping import Floats, Grouping, Integers
from balancing.lower_bounds import minimum_step_times

ROUNDS = 4
"""Shorter target times are tried this many times."""
EFFORT = 4_000_000
"""Limit of the exchanges of a round, about 20 ms of compiled code; see `exchange.even_out_arrays`."""
BISECTIONS = 20
"""Iterations of the bisection that finds target times."""


def exchange_between_steps(
    schedule: Schedule, sizes: Integers, weights: Floats, request: Request, enough: float
) -> Schedule:
    """The schedule, or a faster one; the search ends at a time of `enough`."""
    best, lowest, share = schedule, schedule.time(weights), 1.0
    minimum = _minimum_times(sizes, weights, request, schedule.steps)
    for _ in range(ROUNDS):
        if lowest <= enough or schedule.steps == 1:
            break
        evened = _exchanged(best, _target_times(best, weights, minimum, share), sizes, weights, request)
        other = deal_into_steps(evened, sizes, weights, request, best.steps, best.start)
        other = even_out_within_steps(other, sizes, weights, request)
        if other.time(weights) < lowest * (1 - TOLERANCE):
            best, lowest = other, other.time(weights)
        else:
            share /= 2
    return best


def _minimum_times(sizes: Integers, weights: Floats, request: Request, steps: int) -> Floats:
    """float64 [steps], descending: lower bounds on the times of the longest step, the second longest, and so on."""
    caps = request.caps
    times = minimum_step_times(sizes, weights, request.ranks, steps, caps.max_tokens, caps.max_sequences)
    return np.pad(times, (0, steps - len(times)))


def _target_times(schedule: Schedule, weights: Floats, minimum: Floats, share: float) -> Floats:
    """float64 [steps]: times whose sum is lower by `share` of the waiting, none below its lower bound."""
    loads = schedule.loads(weights)
    times = loads.max(axis=1)
    waiting = float((times - loads.mean(axis=1)).sum())
    rank_of_step = np.argsort(np.argsort(-times, kind="stable"), kind="stable")
    least = np.minimum(times, minimum[rank_of_step])
    low, high = 0.0, float(times.max())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(times - least, middle).sum() < share * waiting else (low, middle)
    targets: Floats = np.maximum(times - high, least)
    return targets


def _exchanged(schedule: Schedule, targets: Floats, sizes: Integers, weights: Floats, request: Request) -> Grouping:
    """Even out excess over target times: each micro-batch starts with the longest target time less its own."""
    longest = float(targets.max())
    base = np.repeat(longest - targets, request.ranks)
    limits = Limits(request.caps.max_tokens, request.caps.max_sequences)
    count, group_of = schedule.grouping.count, schedule.grouping.group_of
    evened = even_out_arrays(group_of, count, weights, sizes, limits, base=base, target=longest, effort=EFFORT)
    return Grouping(evened, count)
