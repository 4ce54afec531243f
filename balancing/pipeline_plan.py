"""The schedule of a mini-batch on a pipeline: how many micro-steps, how heavy each, and in which order.

    each number of micro-steps, from the fewest --+--> as without a pipeline (schedule.py)                      --+
                                                  +--> best shape (pipeline_shape.py) --> dealt (pipeline_dealing) +
      --> fastest order of each (pipeline_order.py) --> the least makespan, with as few micro-steps as come near it

A pipeline of p stages waits about (p - 1) / m of its time for the first and the last of m micro-steps: more of them
help until long sequences, or `Pipeline.overhead`, prolong each.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from balancing.dealing import Request, Schedule, computed_weights
from balancing.errors import CountError
from balancing.grouping import Floats, Integers
from balancing.lower_bounds import most_workload
from balancing.packing import Caps, CountRule
from balancing.pipeline import Pipeline
from balancing.pipeline_dealing import deal_to_times, even_out_steps, likely_times
from balancing.pipeline_levels import covered_shape, levels_of
from balancing.pipeline_order import fastest_order
from balancing.pipeline_shape import Shape, in_units, rounded_limit
from balancing.pipeline_time import makespan
from balancing.schedule import to_ranks, with_steps

MOST_FOR_EACH_STAGE = 12
"""Up to this many micro-steps for each stage are tried, unless caps or settings ask for more."""
COUNT_GROWTH = 1.5
"""Each number of micro-steps tried is about this many times the one before."""
NEAR = 0.01
"""The fewest micro-steps within this share of the least makespan are taken: short kernels cost more than is counted."""


@dataclass(frozen=True, eq=False)
class Work:
    """A mini-batch. sizes: int64 [n]. weights: float64 [n]. Both in descending order of weight, then of size.

    plan: the schedule without a pipeline. computed: the weights as computed by a schedule. divisible: whether sequences
    may be dealt anew, each with its own weight.
    """

    sizes: Integers
    weights: Floats
    plan: Callable[[Request], Schedule]
    computed: Callable[[Schedule], Floats]
    divisible: bool


def schedule_on_pipeline(work: Work, request: Request, pipeline: Pipeline) -> Schedule:
    """The schedule with the least makespan that is found; its number of micro-steps may be above the fewest."""
    first = work.plan(request)
    counts = [first.steps, *_more_steps(first.steps, len(work.sizes), request, pipeline)]
    if work.divisible and pipeline.stages > 1:
        schedules = [first, *_in_best_shape(work, request, pipeline, counts)]
    else:
        schedules = [first, *_planned(work, request, counts[1:])]
    found = [_in_fastest_order(schedule, work, pipeline) for schedule in schedules]
    schedule = _fewest_steps(found)
    return to_ranks(schedule, work.computed(schedule))


def _fewest_steps(found: Sequence[tuple[Schedule, float]]) -> Schedule:
    """The first, with fewest micro-steps, whose makespan is near the least. found: schedules and their makespans."""
    enough = min(time for _, time in found) * (1 + NEAR)
    return next(schedule for schedule, time in found if time <= enough)


def _in_fastest_order(schedule: Schedule, work: Work, pipeline: Pipeline) -> tuple[Schedule, float]:
    """The schedule with its steps in the fastest order, and its makespan."""
    times = schedule.loads(work.computed(schedule)).max(axis=1)
    order = fastest_order(pipeline, times)
    return with_steps(schedule, order), makespan(pipeline, times[order])


def _more_steps(fewest: int, sequences: int, request: Request, pipeline: Pipeline) -> Iterator[int]:
    """Numbers of micro-steps above the fewest, with a sequence for every rank in each."""
    multiple = request.count.multiple_of
    most = min(MOST_FOR_EACH_STAGE * pipeline.stages, sequences // request.ranks) // multiple * multiple
    steps = fewest
    while pipeline.stages > 1 and steps < most:
        steps = min(most, -(-max(steps + 1, round(COUNT_GROWTH * steps)) // multiple) * multiple)
        yield steps


def _planned(work: Work, request: Request, counts: Sequence[int]) -> Iterator[Schedule]:
    """Schedules as without a pipeline, for each number of micro-steps that the sequences fill."""
    for steps in counts:
        with suppress(CountError):
            yield work.plan(replace(request, count=CountRule(steps, request.count.multiple_of)))


def _in_best_shape(work: Work, request: Request, pipeline: Pipeline, counts: Sequence[int]) -> Iterator[Schedule]:
    """The schedule dealt to the best shape of all numbers of micro-steps, as far as caps allow.

    A number whose shape is not shorter by `NEAR` than what is found is passed over.
    """
    found, least = list[tuple[Schedule, float]](), float("inf")
    for steps in counts:
        mean = float(work.weights.sum()) / request.ranks / steps
        if len(work.sizes) < steps * request.ranks or mean == 0:
            continue
        shape = shape_for(work.sizes, work.weights, request, pipeline, steps, mean)
        if mean * shape.makespan > least * (1 - NEAR):
            continue
        dealt = list(deal_to_times(work.sizes, work.weights, request, shape.times * mean))
        if dealt:
            best = min(dealt, key=lambda each: makespan(pipeline, each.loads(work.weights).max(axis=1)))
            found.append((best, makespan(pipeline, likely_times(best, work.weights))))
            least = min(least, found[-1][1])
    if found:
        yield even_out_steps(_fewest_steps(found), work.sizes, work.weights, request)


def shape_for(sizes: Integers, weights: Floats, request: Request, pipeline: Pipeline, steps: int, mean: float) -> Shape:
    """The best shape in which long sequences fit."""
    scaled, caps = in_units(pipeline, mean), request.caps
    most = rounded_limit(most_in_a_step(sizes, weights, request.ranks, caps) / mean)
    levels = levels_of(sizes, weights / mean, request.ranks, caps, steps)
    return covered_shape(scaled, steps, most, levels)


def most_in_a_step(sizes: Integers, weights: Floats, ranks: int, caps: Caps) -> float:
    """The most work of a micro-step under the cap on tokens, mean of its ranks."""
    return float(most_workload(sizes, weights, np.array([ranks]), caps.max_tokens)[0]) / ranks


def computed_alone(weights: Floats, request: Request) -> Callable[[Schedule], Floats]:
    """`Work.computed` where nothing is shared."""
    return lambda schedule: computed_weights(schedule.grouping, weights, request)
