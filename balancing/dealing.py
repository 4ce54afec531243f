"""Dealing: all micro-batches of a mini-batch, sorted by weight, one row of `ranks` for each micro-step.

    sequences --+-- Karmarkar-Karp: ranks, then micro-batches --+--> exchanges --> sorted, dealt --> exchanges
                +-- longest first, and other ways to fill ------+    of all        into rows         within each row

Karmarkar-Karp (differenced.py) is the start, the others (packing.py) where its micro-batches cannot be brought under
the caps. Sorted neighbours differ least, and neighbours wait for one another.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from balancing.differenced import differenced, mended
from balancing.errors import CountError
from balancing.exchange import TOLERANCE
from balancing.grouping import Floats, Grouping, Integers
from balancing.packing import (
    Caps,
    CountRule,
    evened,
    fewest_by_best_fit,
    fewest_micro_batches,
    heaviest_first,
    pack_evenly,
    pack_into,
)

Order = Literal["descending", "small_ends"]
Start = Literal["karmarkar_karp", "longest_first", "longest_with_others", "none", "verl", "roll", "mindspeed_rl"]
"""What a schedule was refined from: a way to fill micro-batches, or the algorithm of a plan that is not refined."""

STEPS_TRIED = 8
"""Numbers of micro-steps from the lower bound upwards that are tried before that of best-fit-decreasing is taken."""


@dataclass(frozen=True)
class Request:
    """What a schedule must keep: `steps` per rank follows from the caps, at least `count` allows, none wholly empty."""

    ranks: int
    caps: Caps
    count: CountRule
    allow_empty: bool
    order: Order


@dataclass(frozen=True, eq=False)
class Schedule:
    """grouping: the micro-batch of each sequence of a mini-batch; number `step * ranks + rank` is that of a rank."""

    grouping: Grouping
    steps: int
    start: Start

    def loads(self, weights: Floats) -> Floats:
        """float64 [steps, ranks]."""
        return self.grouping.sums(weights).reshape(self.steps, -1)

    def time(self, weights: Floats) -> float:
        """The sum over micro-steps of the heaviest rank's weight."""
        return float(self.loads(weights).max(axis=1).sum())


def checked_steps(needed: int, fewest_on_a_rank: int, sequences: int, request: Request) -> int:
    """Micro-batches per rank; CountError if a step, or without `allow_empty` a micro-batch, would have no sequence."""
    steps = request.count.at_least(needed, sequences)
    if not request.allow_empty and steps > fewest_on_a_rank:
        raise CountError(
            f"a mini-batch of {sequences} sequences cannot fill {steps} micro-batches on each of "
            f"{request.ranks} ranks; set allow_empty=True, or lower ranks, min_count or multiple_of"
        )
    return steps


def dealt(sizes: Integers, weights: Floats, request: Request) -> Schedule:
    """In as few steps as a start succeeds with, Karmarkar-Karp before others."""
    for steps in _steps_to_try(sizes, request):
        schedule = dealt_into(sizes, weights, request, steps)
        if schedule is not None:
            return schedule
    raise RuntimeError("best-fit-decreasing found no place in its own number of micro-batches; this is a defect")


def _steps_to_try(sizes: Integers, request: Request) -> Iterator[int]:
    """From the lower bound upwards; at last so many that best-fit-decreasing fits."""
    ranks, sequences = request.ranks, len(sizes)
    lowest = -(-fewest_micro_batches(sizes, request.caps) // ranks)
    for needed in range(lowest, lowest + STEPS_TRIED * request.count.multiple_of, request.count.multiple_of):
        yield checked_steps(needed, sequences // ranks, sequences, request)
    enough = -(-fewest_by_best_fit(sizes, request.caps) // ranks)
    yield checked_steps(enough, sequences // ranks, sequences, request)


def dealt_into(sizes: Integers, weights: Floats, request: Request, steps: int) -> Schedule | None:
    """Micro-batches of equal weight, the heaviest `ranks` in the first step, and so on; None where they do not fit."""
    by_differencing = from_karmarkar_karp(sizes, weights, request, steps)
    return by_differencing or from_longest_first(sizes, weights, request, steps)


def from_karmarkar_karp(sizes: Integers, weights: Floats, request: Request, steps: int) -> Schedule | None:
    """Refined from Karmarkar-Karp; None in the padded layout, or where caps cannot be kept from there."""
    count, caps = steps * request.ranks, request.caps
    if caps.padded or len(sizes) < count:
        return None
    start = differenced(weights, request.ranks, steps)
    group_of = mended(sizes, weights, start.group_of, count, caps.max_tokens, caps.max_sequences)
    if (group_of < 0).any():
        return None
    packed = evened(Grouping(group_of, count), weights, sizes, caps)
    return evened_steps(in_rows(packed, sizes, weights, request, steps, "karmarkar_karp"), sizes, weights, request)


def from_longest_first(sizes: Integers, weights: Floats, request: Request, steps: int) -> Schedule | None:
    """Refined from longest-first, or from what else finds room; None where nothing does."""
    count = min(steps * request.ranks, len(sizes))
    if request.caps.padded:
        packed: Grouping | None = pack_evenly(sizes, weights, request.caps, CountRule(count))
    else:
        packed = pack_into(sizes, weights, request.caps, count)
    if packed is None or packed.count > steps * request.ranks:
        return None
    schedule = in_rows(packed, sizes, weights, request, steps, "longest_first")
    return schedule if request.caps.padded else evened_steps(schedule, sizes, weights, request)


def in_rows(packed: Grouping, sizes: Integers, weights: Floats, request: Request, steps: int, start: Start) -> Schedule:
    """Micro-batches sorted by weight and dealt into steps."""
    packed = heaviest_first(packed, sizes, computed(packed, weights, request), np.arange(len(sizes)))
    places = _places(packed.count, steps, request.ranks)
    return Schedule(packed.renumbered(places, steps * request.ranks), steps, start)


def computed(grouping: Grouping, weights: Floats, request: Request) -> Floats:
    """float64 [n]: weights as they are computed, in the padded layout each row as the heaviest of its micro-batch."""
    return grouping.heaviest(weights) if request.caps.padded else weights


def evened_steps(schedule: Schedule, sizes: Integers, weights: Floats, request: Request) -> Schedule:
    """Exchanges between the ranks of each micro-step."""
    group_of = schedule.grouping.group_of.copy()
    loads = schedule.loads(weights)
    for step in np.flatnonzero(loads.max(axis=1) > loads.mean(axis=1) * (1 + TOLERANCE)):
        rows = np.flatnonzero(group_of // request.ranks == step)
        ranks = Grouping(group_of[rows] - step * request.ranks, request.ranks)
        even = evened(ranks, weights[rows], sizes[rows], request.caps, only_heaviest=True)
        group_of[rows] = even.group_of + step * request.ranks
    return replace(schedule, grouping=Grouping(group_of, schedule.grouping.count))


def _places(groups: int, steps: int, ranks: int) -> Integers:
    """int64 [groups]: where each goes, in order; every step gets one or more, those at the end as few as that."""
    spare = groups - steps
    in_step = 1 + np.clip(spare - np.arange(steps) * (ranks - 1), 0, ranks - 1)
    before = np.cumsum(in_step) - in_step
    step = np.repeat(np.arange(steps), in_step)
    places: Integers = step * ranks + np.arange(groups) - before[step]
    return places
