"""The order of micro-steps on a pipeline: the one with the least makespan that is found.

    micro-steps in the order given, descending, light at both ends --> the fastest of these
      --> move one, or exchange two, as long as the simulated makespan falls --> order

The published heuristic is light ones at both ends (`small_ends`), where a pipeline fills and drains. The search starts
from it among others, so it is never slower.
"""

import numpy as np
from numpy.typing import ArrayLike

from balancing.compiled import compiled
from balancing.grouping import Floats, Integers
from balancing.pipeline import Pipeline
from balancing.pipeline_time import ends_of, micro_step_times, passes_of

EFFORT = 10_000_000
"""Limit of one search: number of passes simulated, about 30 ms of compiled code."""
LEAST_GAIN = 1e-9
"""A change is kept if the makespan falls by more than this share."""


def small_ends(times: Floats) -> Integers:
    """int64 [m]: the published order, heaviest in the middle, light ones at both ends. times: float64 [m]."""
    descending = np.argsort(-times, kind="stable")
    return np.concatenate([descending[1::2][::-1], descending[0::2]])


def fastest_order(pipeline: Pipeline, times: ArrayLike, effort: int = EFFORT) -> Integers:
    """int64 [m]: the micro-steps in the order of execution, never slower than as given, descending or `small_ends`.

    times: as of `pipeline_time.timeline`, which it also raises as.
    """
    total = micro_step_times(pipeline, times)
    passes = passes_of(pipeline, len(total))
    graph = (passes.before, passes.needed, passes.sent, passes.micro_batch, passes.cost)
    descending = np.argsort(-total, kind="stable")
    starts = [np.arange(len(total)), small_ends(total), descending, descending[::-1]]
    if np.ptp(total) == 0:
        return starts[0]
    simulations = max(1, effort // len(passes.cost) // len(starts))
    found = [improved(*graph, total, start.copy(), simulations) for start in starts]
    return min(found, key=lambda order: float(ends_of(*graph, total[order]).max()))


@compiled
def improved(
    before: Integers,
    needed: Integers,
    sent: Floats,
    micro_batch: Integers,
    cost: Floats,
    times: Floats,
    order: Integers,
    simulations: int,
) -> Integers:
    """`order` after moves and exchanges that each shorten the makespan, until none does or the limit is reached."""
    best = ends_of(before, needed, sent, micro_batch, cost, times[order]).max()
    steps, moved = len(order), True
    while moved and simulations > 0:
        moved = False
        for first in range(steps):
            for second in range(steps):
                for exchange in range(2):
                    if first == second or (exchange == 1 and first > second) or simulations <= 0:
                        continue
                    other = order.copy()
                    if exchange == 1:
                        other[first], other[second] = order[second], order[first]
                    elif first < second:
                        other[first:second] = order[first + 1 : second + 1]
                        other[second] = order[first]
                    else:
                        other[second + 1 : first + 1] = order[second:first]
                        other[second] = order[first]
                    time = ends_of(before, needed, sent, micro_batch, cost, times[other]).max()
                    simulations -= 1
                    if time < best * (1 - LEAST_GAIN):
                        best, order, moved = time, other, True
    return order
