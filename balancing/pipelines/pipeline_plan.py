"""Schedule a mini-batch on a pipeline: how many micro-steps, how heavy each, and in which order.

    each number of micro-steps, from the fewest --+--> as without a pipeline (search/schedule.py)      --+
                                                  +--> best shape (micro_step_targets.py), dealt to it --+
      --> fastest order of each (pipeline_time.py) --> the least makespan, or near it with fewer micro-steps

A pipeline of p stages waits about (p - 1) / m of its time for the first and the last of m micro-steps.
Sequences are dealt to the target times:

    sequences, heaviest first --+--> layers of `ranks` neighbours, one for each rank
                                |      --> to the micro-step with most room left below its time and the caps
                                +--> to the micro-batch with most room left below its step's time, too
      --> exchanges within each step (search/exchange.py)

Layers of neighbours keep the ranks of a step even, also under tight caps. One by one, short sequences fill
the room that few long ones leave in a micro-step.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from balancing.basics.compiled import compiled
from balancing.basics.grouping import Caps, Floats, Grouping, Integers
from balancing.errors import CountError
from balancing.pipelines.micro_step_targets import (
    covered_shape,
    in_units,
    levels_of,
    rounded_limit,
)
from balancing.pipelines.pipeline import Pipeline
from balancing.pipelines.pipeline_time import fastest_order, makespan
from balancing.search.assignment import Request, Schedule, even_out_within_steps
from balancing.search.lower_bounds import most_workload
from balancing.search.packing import CountRule
from balancing.search.schedule import to_ranks, with_steps

MOST_FOR_EACH_STAGE = 12
"""Most micro-steps tried per stage, unless caps or settings ask for more."""
COUNT_GROWTH = 1.5
NEAR = 0.01
"""The fewest micro-steps within this share of the least makespan win: short kernels cost more than is
counted.
"""


@dataclass(frozen=True, eq=False)
class Work:
    """A mini-batch. sizes: int64 [n]. weights: float64 [n]. Both in descending order of weight, then of size.

    plan: without a pipeline. computed: the weights that a schedule computes. divisible: whether sequences may
    be dealt.
    """

    sizes: Integers
    weights: Floats
    plan: Callable[[Request], Schedule]
    computed: Callable[[Schedule], Floats]
    divisible: bool


def schedule_on_pipeline(work: Work, request: Request, pipeline: Pipeline) -> Schedule:
    """Return the schedule with the least makespan found. It may have more than the fewest micro-steps."""
    first = work.plan(request)
    counts = [first.steps, *_more_steps(first.steps, len(work.sizes), request, pipeline)]
    if work.divisible and pipeline.stages > 1:
        schedules = [first, *_in_best_shape(work, request, pipeline, counts)]
    else:
        schedules = [first, *_planned(work, request, counts[1:])]
    timed_schedules = [
        _in_fastest_order(schedule, work, pipeline) for schedule in schedules
    ]
    schedule = _fewest_steps(timed_schedules)
    return to_ranks(schedule, work.computed(schedule))


def _fewest_steps(timed_schedules: Sequence[tuple[Schedule, float]]) -> Schedule:
    enough = min(time for _, time in timed_schedules) * (1 + NEAR)
    return next(schedule for schedule, time in timed_schedules if time <= enough)


def _in_fastest_order(
    schedule: Schedule, work: Work, pipeline: Pipeline
) -> tuple[Schedule, float]:
    times = schedule.loads(work.computed(schedule)).max(axis=1)
    order = fastest_order(pipeline, times)
    return with_steps(schedule, order), makespan(pipeline, times[order])


def _more_steps(
    fewest: int, sequences: int, request: Request, pipeline: Pipeline
) -> Iterator[int]:
    multiple = request.count.multiple_of
    most = (
        min(MOST_FOR_EACH_STAGE * pipeline.stages, sequences // request.ranks)
        // multiple
        * multiple
    )
    steps = fewest
    while pipeline.stages > 1 and steps < most:
        steps = min(
            most, -(-max(steps + 1, round(COUNT_GROWTH * steps)) // multiple) * multiple
        )
        yield steps


def _planned(work: Work, request: Request, counts: Sequence[int]) -> Iterator[Schedule]:
    for steps in counts:
        with suppress(CountError):
            yield work.plan(
                replace(request, count=CountRule(steps, request.count.multiple_of))
            )


def _in_best_shape(
    work: Work, request: Request, pipeline: Pipeline, counts: Sequence[int]
) -> Iterator[Schedule]:
    """Yield the best schedule that is dealt to the best shape of a number of micro-steps."""
    timed_schedules = list[tuple[Schedule, float]]()
    least = float("inf")
    for steps in counts:
        mean = float(work.weights.sum()) / request.ranks / steps
        if len(work.sizes) < steps * request.ranks or mean == 0:
            continue
        most = rounded_limit(
            most_in_a_step(work.sizes, work.weights, request.ranks, request.caps) / mean
        )
        levels = levels_of(
            work.sizes, work.weights / mean, request.ranks, request.caps, steps
        )
        shape = covered_shape(in_units(pipeline, mean), steps, most, levels)
        if mean * shape.makespan > least * (1 - NEAR):
            continue
        dealt = list(deal_to_times(work.sizes, work.weights, request, shape.times * mean))
        if dealt:
            best = min(
                dealt,
                key=lambda schedule: makespan(
                    pipeline, schedule.loads(work.weights).max(axis=1)
                ),
            )
            timed_schedules.append(
                (best, makespan(pipeline, likely_times(best, work.weights)))
            )
            least = min(least, timed_schedules[-1][1])
    if timed_schedules:
        yield even_out_within_steps(
            _fewest_steps(timed_schedules), work.sizes, work.weights, request, EVEN, EFFORT
        )


def most_in_a_step(sizes: Integers, weights: Floats, ranks: int, caps: Caps) -> float:
    """Return the most work of a micro-step under the cap on tokens, mean of its ranks."""
    return (
        float(most_workload(sizes, weights, np.array([ranks]), caps.max_tokens)[0]) / ranks
    )


NOWHERE = -1
EVEN = 2e-4
"""Ranks of a step are even if the heaviest is within this share of their mean."""
EFFORT = 300_000
"""Limit of exchanges within a step, about 2 ms of compiled code. See `exchange.even_out`."""

TRIES = 50_000
"""Limit of full micro-batches found when sequences are dealt one by one, about 10 ms of compiled code."""


def deal_to_times(
    sizes: Integers, weights: Floats, request: Request, times: Floats
) -> Iterator[Schedule]:
    """Yield schedules whose steps take about `times`, ranks not yet even, or none if caps or counts forbid
    it.
    """
    steps = len(times)
    caps = request.caps
    if caps.padded or len(sizes) < steps * request.ranks:
        return
    for deal in (_deal_layers, _deal_singly):
        group_of = deal(
            sizes, weights, request.ranks, times, caps.max_tokens, caps.max_sequences
        )
        if (group_of != NOWHERE).all():
            yield Schedule(
                Grouping(group_of, steps * request.ranks), steps, "pipeline_shape"
            )


def likely_times(dealt: Schedule, weights: Floats) -> Floats:
    """Return each step's time once its ranks are even: their mean, or a heavier sequence."""
    heaviest = np.zeros(dealt.steps)
    ranks = dealt.grouping.count // dealt.steps
    np.maximum.at(heaviest, dealt.grouping.group_of // ranks, weights)
    likely: Floats = np.maximum(dealt.loads(weights).mean(axis=1), heaviest)
    return likely


@compiled
def _deal_layers(
    sizes: Integers,
    weights: Floats,
    ranks: int,
    times: Floats,
    max_tokens: int,
    max_sequences: int,
) -> Integers:
    steps = len(times)
    full = len(sizes) // ranks
    tokens = np.zeros((steps, ranks), np.int64)
    loads = np.zeros((steps, ranks))
    layers = np.zeros(steps, np.int64)
    room = times.copy()
    empty = steps
    group_of = np.full(len(sizes), NOWHERE, np.int64)
    for layer in range(-(-len(sizes) // ranks)):
        first = layer * ranks
        stop = min(len(sizes), (layer + 1) * ranks)
        placed = False
        for step in np.argsort(-room):
            # No step may stay empty: the last full layers go to those that have none.
            if layers[step] == max_sequences or (
                layer < full and full - layer == empty and layers[step] > 0
            ):
                continue
            receivers = np.argsort(loads[step])[: stop - first]
            new_tokens = tokens[step][receivers] + sizes[first:stop]
            if (new_tokens > max_tokens).any():
                continue
            placed = True
            for place in range(stop - first):
                rank = receivers[place]
                tokens[step, rank] += sizes[first + place]
                loads[step, rank] += weights[first + place]
                group_of[first + place] = step * ranks + rank
            empty -= 1 if layers[step] == 0 else 0
            layers[step] += 1
            room[step] -= weights[first:stop].sum() / ranks
            break
        if not placed:
            break
    return group_of


@compiled
def _deal_singly(
    sizes: Integers,
    weights: Floats,
    ranks: int,
    times: Floats,
    max_tokens: int,
    max_sequences: int,
) -> Integers:
    count = len(times) * ranks
    smallest = sizes.min()
    tries = TRIES
    tokens = np.zeros(count, np.int64)
    members = np.zeros(count, np.int64)
    empty = count
    group_of = np.full(len(sizes), NOWHERE, np.int64)
    # (load - time, micro-batch) of those with room.
    heap = [(-times[group // ranks], group) for group in range(count)]
    heapq.heapify(heap)
    passed = heap[:0]
    for sequence in range(len(sizes)):
        # The last sequences go to micro-batches that have none.
        if len(sizes) - sequence == empty:
            heap = [(excess, group) for excess, group in heap if members[group] == 0]
            heapq.heapify(heap)
        while len(heap) > 0:
            excess, group = heapq.heappop(heap)
            if tokens[group] + sizes[sequence] > max_tokens:
                passed.append((excess, group))
                tries -= 1
                if tries < 0:
                    return group_of
                continue
            group_of[sequence] = group
            tokens[group] += sizes[sequence]
            empty -= 1 if members[group] == 0 else 0
            members[group] += 1
            if members[group] < max_sequences and tokens[group] + smallest <= max_tokens:
                heapq.heappush(heap, (excess + weights[sequence], group))
            break
        if group_of[sequence] == NOWHERE:
            break
        while len(passed) > 0:
            heapq.heappush(heap, passed.pop())
    return group_of
