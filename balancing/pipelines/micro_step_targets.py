"""Find target times of a pipeline's micro-steps: the best split of the work (a shape), and a bound on all
splits.

    t, the shares of the micro-steps <------ less where the longest path has weight -----+
      --> longest path of passes --> its weight on each micro-step --> mean of all paths -+--> lower bound

Equal micro-steps are not the fastest: a pipeline fills and drains faster with light ones at the ends. With
the order of passes fixed, the makespan of times t is the longest path through the passes, max over paths of
`a . t + d` (a: share of each micro-step's time on the path, d: transfers and overheads). Minimising over all
t >= 0 that add up to the work is a game: one splits the work, the other picks a path. Multiplicative weights
solve it (Freund and Schapire 1999): t moves away from the paths picked so far, and the mean t and the mean
path both approach the optimum. Proof of the bound: for every t the longest path is at least as long as the
mean of any paths, so `makespan(t) >= mean(a) . t + mean(d) >= min over t of mean(a) . t + mean(d)`, whichever
paths were picked.

Long sequences, which cannot be cut, put levels on these times:

    sequences, heaviest first --> every `ranks`-th --> its weight v_j: more than j * ranks are as heavy
    best shape of times t --> sum over steps of min(q_j, floor(t / v_j)) above j, for every j?
                              no: raise the step nearest to the next multiple of v_j, and again --> times

A micro-batch of time t holds at most floor(t / v_j) such sequences, and at most q_j under the caps, so every
plan passes this test. A shape that fails cannot be dealt: its steps would come out longer.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from balancing.basics.compiled import compiled
from balancing.basics.grouping import Caps, Floats, Integers
from balancing.pipelines.pipeline import Pipeline
from balancing.pipelines.pipeline_time import ends_of, passes_of

ROUNDS = 3_000
"""Rounds of the game, about 5 ms of compiled code for 4 stages and 32 micro-steps."""
RATE = 0.5
"""Speed of t, divided by the square root of the round. A slow t comes nearer to the best shape."""
RATE_OF_BOUND = 2.0
"""Speed of t if only the bound for a forced long micro-step counts, which a fast t reaches sooner."""
STEP = 16
"""Ratios to the mean micro-step are rounded to 1 / STEP, so that shapes can be cached."""
NO_LIMIT = 2.0
"""A limit above so many times the mean micro-step counts as none."""


@dataclass(frozen=True, eq=False)
class Shape:
    """times: float64 [m], the best split found, their mean 1. makespan: of these. bound: no split
    takes less.
    """

    times: Floats
    makespan: float
    bound: float


@lru_cache(maxsize=256)
def best_shape(
    pipeline: Pipeline,
    micro_steps: int,
    most: float = np.inf,
    place: int = -1,
    least: float = 0.0,
    rate: float = RATE,
) -> Shape:
    """Find the best split of `micro_steps` units of work over as many micro-steps.

    pipeline: with transfer and overhead in these units. most: of any micro-step, at least 1. place, least:
    micro-step `place` (-1: none) has at least `least`, which may be above `most`. rate: speed of t. Raises
    CountError as `actions`.
    """
    floor = np.zeros(micro_steps)
    if place >= 0:
        floor[place] = min(least, float(micro_steps))
    return split(pipeline, floor, most, ROUNDS, rate)


def split(
    pipeline: Pipeline, floor: Floats, most: float, rounds: int, rate: float = RATE
) -> Shape:
    """Split as `best_shape`, with a floor for each micro-step, which may be above `most`. Their mean is at
    most 1.
    """
    passes = passes_of(pipeline, len(floor))
    graph = (passes.before, passes.needed, passes.sent, passes.micro_batch, passes.cost)
    limits = np.maximum(floor, max(1.0, most))
    times, makespan, bound = _play(*graph, floor, limits, pipeline.overhead, rounds, rate)
    return Shape(times, float(makespan), float(bound))


@compiled
def _play(
    predecessor: Integers,
    needed: Integers,
    sent: Floats,
    micro_batch: Integers,
    cost: Floats,
    floor: Floats,
    limits: Floats,
    overhead: float,
    rounds: int,
    rate: float,
) -> tuple[Floats, float, float]:
    steps = len(floor)
    disliked = np.zeros(steps)
    mean = np.zeros(steps)
    path = np.zeros(steps)
    fixed = 0.0
    total = 0.0
    best = np.ones(steps)
    lowest = np.inf
    bound = 0.0
    for played in range(1, rounds + 1):
        # The last try is the mean, which is often better than all others.
        times = (
            mean / total
            if played == rounds
            else _within(np.exp(disliked.min() - disliked), floor, limits)
        )
        length, weight = _longest(
            predecessor, needed, sent, micro_batch, cost, times + overhead, steps
        )
        if length < lowest:
            lowest = length
            best = times
        mean = mean + played * times
        path = path + played * weight
        total = total + played
        fixed += played * (length - (weight * times).sum())
        bound = max(bound, (_least(path, floor, limits) + fixed) / total)
        disliked += weight * (rate * steps / length / np.sqrt(played))
    return best, lowest, bound


@compiled
def _longest(
    predecessor: Integers,
    needed: Integers,
    sent: Floats,
    micro_batch: Integers,
    cost: Floats,
    times: Floats,
    steps: int,
) -> tuple[float, Floats]:
    """Return the length of the longest path, and its share of each micro-step's time: float64 [steps]."""
    ends = ends_of(predecessor, needed, sent, micro_batch, cost, times)
    weight = np.zeros(steps)
    at = int(np.argmax(ends))
    length = ends[at]
    while at >= 0:
        weight[micro_batch[at]] += cost[at]
        previous = predecessor[at]
        source = needed[at]
        if source >= 0 and (previous < 0 or ends[source] + sent[at] > ends[previous]):
            previous = source
        at = previous
    return length, weight


@compiled
def _within(weights: Floats, floor: Floats, limits: Floats) -> Floats:
    free = np.ones(len(weights))
    total = float(len(weights))
    times: Floats = weights / weights.sum() * total
    for _ in range(len(weights)):
        moved = False
        for step in range(len(weights)):
            bounded = min(max(times[step], floor[step]), limits[step])
            if free[step] > 0 and bounded != times[step]:
                times[step], free[step], moved = bounded, 0.0, True
        share = (weights * free).sum()
        if not moved or share == 0:
            break
        rest = total - (times * (1 - free)).sum()
        times = np.where(free > 0, weights * (max(rest, 0.0) / share), times)
    return times


@compiled
def _least(path: Floats, floor: Floats, limits: Floats) -> float:
    """Minimise `path . t` over all t within floor and limits whose mean is 1."""
    value = float((path * floor).sum())
    budget = len(path) - floor.sum()
    for step in np.argsort(path):
        share = min(budget, limits[step] - floor[step])
        value += share * path[step]
        budget -= share
    return value


def least_makespan(
    pipeline: Pipeline,
    micro_steps: int,
    work: float,
    time: float,
    most: float = np.inf,
    longest: float = 0.0,
) -> float:
    """Bound the makespan of all plans with so many micro-steps, in the unit of `work`, `time`, `longest`.

    Returns the greater of two bounds. First, the means over ranks add up to `work` and are at most `most`.
    Second, the times add up to at least `time`, and one of them is at least `longest`, wherever it lies.
    """
    evenly = work / micro_steps
    relaxed = best_shape(
        in_units(pipeline, evenly), micro_steps, rounded_limit(most / evenly)
    )
    bound = evenly * relaxed.bound
    mean = time / micro_steps
    scaled = in_units(pipeline, mean)
    least = float(np.floor(longest / mean * STEP) / STEP)
    free = best_shape(scaled, micro_steps)
    if least <= free.times.max():
        return max(bound, mean * free.bound)
    at = (
        best_shape(scaled, micro_steps, np.inf, k, least, RATE_OF_BOUND).bound
        for k in range(micro_steps)
    )
    return max(bound, mean * max(free.bound, min(at)))


def in_units(pipeline: Pipeline, mean: float) -> Pipeline:
    """Convert transfer and overhead to units of the mean micro-step, rounded down."""
    transfer, overhead = (
        np.floor(value / mean * 1000) / 1000
        for value in (pipeline.transfer, pipeline.overhead)
    )
    return replace(pipeline, transfer=float(transfer), overhead=float(overhead))


def rounded_limit(most: float) -> float:
    """Round up a limit over the mean micro-step, to infinity if it hardly limits a shape."""
    return float(np.ceil(most * STEP) / STEP) if most < NO_LIMIT else float("inf")


REPAIRS = 4
STRIDES = 6
"""Raised steps are first shifted by this share of all, then by less, as long as that helps."""
LEAST_GAIN = 1e-3
"""A shift must reduce the makespan by more than this share."""
REPAIR_ROUNDS = 200
"""Rounds of the game for a repaired shape, about 1 ms of compiled code for 4 stages and 32 micro-steps."""
CLOSE = 1e-9
"""Tolerance for rounding errors: a time holds a sequence that is longer by this share."""


class Levels(NamedTuple):
    """weights: float64 [levels], v_j, descending. together: float64 [levels], q_j >= 1."""

    weights: Floats
    together: Floats


def levels_of(
    sizes: Integers, weights: Floats, ranks: int, caps: Caps, most: int
) -> Levels:
    """Return the first `most` levels. sizes: int64 [n]. weights: float64 [n], both in descending weight."""
    at = np.arange(0, len(weights), ranks)[:most]
    smallest = np.minimum.accumulate(sizes)[at]
    return Levels(
        weights[at],
        np.minimum(caps.max_tokens // smallest, caps.max_sequences).astype(np.float64),
    )


def covered_shape(pipeline: Pipeline, steps: int, most: float, levels: Levels) -> Shape:
    """Find the best shape that grants all levels. The mean of its times is 1, or above if the levels ask for
    more.

    pipeline, levels: in units of the mean micro-step. most: of a micro-step that no level raises. bound: 0,
    none.
    """
    free = best_shape(pipeline, steps, most)
    floor = _raised(free.times, np.zeros(steps), *levels)
    if not floor.any():
        return free
    best, floor = _granted(pipeline, most, levels, floor)
    stride = max(pipeline.stages, steps // STRIDES)
    while stride:
        for shift in (stride, -stride):
            candidate, raised = _granted(pipeline, most, levels, np.roll(floor, shift))
            if candidate.makespan < best.makespan * (1 - LEAST_GAIN):
                best = candidate
                floor = raised
                break
        else:
            stride //= 2
    return best


def _granted(
    pipeline: Pipeline, most: float, levels: Levels, floor: Floats
) -> tuple[Shape, Floats]:
    for _ in range(REPAIRS):
        total = max(1.0, float(floor.mean()))
        shape = split(pipeline, floor / total, most, REPAIR_ROUNDS)
        shape = Shape(total * shape.times, total * shape.makespan, 0.0)
        raised = _raised(shape.times, floor, *levels)
        if (raised == floor).all():
            break
        floor = raised
    return shape, floor


@compiled
def _raised(times: Floats, floor: Floats, weights: Floats, together: Floats) -> Floats:
    times = np.maximum(times, floor)
    floor = floor.copy()
    for level in range(len(weights)):
        weight = weights[level]
        most = together[level]
        if weight <= 0.0:
            break
        held = np.minimum(np.floor(times / weight * (1 + CLOSE)), most)
        missing = level + 1 - held.sum()
        while missing > 0 and held.min() < most:
            step = int(np.argmax(np.where(held < most, times / weight - held, -1.0)))
            held[step] += 1.0
            times[step] = floor[step] = weight * held[step]
            missing -= 1
    return floor
