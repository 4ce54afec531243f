"""Dealing: the micro-batches of a mini-batch, sorted by weight, `ranks` of them to each micro-step.

    sequences --+-- Karmarkar-Karp (initial_assignment.py) --+--> exchanges --> sorted, dealt --> exchanges
                +-- longest first (packing.py) --------------+    of all        into steps        within each step

Longest first is the fallback if Karmarkar-Karp's micro-batches cannot be brought under the caps. Micro-batches are
sorted because all ranks of a step wait for the heaviest, and sorted neighbours differ least.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from balancing.errors import CountError
from balancing.exchange import TOLERANCE
from balancing.grouping import Floats, Grouping, Integers
from balancing.initial_assignment import karmarkar_karp_twice, repair_caps
from balancing.packing import (
    Caps,
    CountRule,
    even_out,
    fewest_by_best_fit,
    fewest_micro_batches,
    heaviest_first,
    pack_evenly,
    pack_into,
)

Order = Literal["descending", "small_ends", "makespan"]
Start = Literal[
    "karmarkar_karp", "longest_first", "longest_with_others", "pipeline_shape", "shared_prefixes",
    "none", "verl", "roll", "mindspeed_rl",
]  # fmt: skip
"""The initial assignment that a schedule was refined from, or the algorithm of a plan that is not refined."""

STEPS_TRIED = 8
"""Packing is tried with this many numbers of micro-steps, from the lower bound, before that of best-fit-decreasing."""


@dataclass(frozen=True)
class Request:
    """Constraints of a schedule. count: of the micro-batches on each rank, the same for all ranks."""

    ranks: int
    caps: Caps
    count: CountRule
    allow_empty: bool
    order: Order


@dataclass(frozen=True, eq=False)
class Schedule:
    """grouping: the micro-batch of each sequence of a mini-batch; micro-batch `step * ranks + rank` is of that rank."""

    grouping: Grouping
    steps: int
    start: Start

    def loads(self, weights: Floats) -> Floats:
        """float64 [steps, ranks], the weight of each micro-batch."""
        return self.grouping.sums(weights).reshape(self.steps, -1)

    def time(self, weights: Floats) -> float:
        """The sum over micro-steps of the heaviest rank's weight."""
        return float(self.loads(weights).max(axis=1).sum())


def checked_steps(needed: int, fewest_on_a_rank: int, sequences: int, request: Request) -> int:
    """The number of micro-steps; CountError if a step, or without `allow_empty` a micro-batch, would be empty."""
    steps = request.count.at_least(needed, sequences)
    if not request.allow_empty and steps > fewest_on_a_rank:
        raise CountError(
            f"a mini-batch of {sequences} sequences cannot fill {steps} micro-batches on each of "
            f"{request.ranks} ranks; set allow_empty=True, or lower ranks, min_count or multiple_of"
        )
    return steps


def deal(sizes: Integers, weights: Floats, request: Request) -> Schedule:
    """The schedule with the fewest steps that is found, from Karmarkar-Karp if possible, else from longest first."""
    for steps in _steps_to_try(sizes, request):
        schedule = from_karmarkar_karp(sizes, weights, request, steps)
        schedule = schedule or from_longest_first(sizes, weights, request, steps)
        if schedule is not None:
            return schedule
    raise RuntimeError("best-fit-decreasing found no place in its own number of micro-batches; this is a defect")


def _steps_to_try(sizes: Integers, request: Request) -> Iterator[int]:
    """Upwards from the lower bound; the last is the number that best-fit-decreasing needs."""
    ranks, sequences = request.ranks, len(sizes)
    lowest = -(-fewest_micro_batches(sizes, request.caps) // ranks)
    for needed in range(lowest, lowest + STEPS_TRIED * request.count.multiple_of, request.count.multiple_of):
        yield checked_steps(needed, sequences // ranks, sequences, request)
    enough = -(-fewest_by_best_fit(sizes, request.caps) // ranks)
    yield checked_steps(enough, sequences // ranks, sequences, request)


def from_karmarkar_karp(sizes: Integers, weights: Floats, request: Request, steps: int) -> Schedule | None:
    """A schedule refined from Karmarkar-Karp; None for the padded layout, or if the caps cannot be repaired."""
    count, caps = steps * request.ranks, request.caps
    if caps.padded or len(sizes) < count:
        return None
    start = karmarkar_karp_twice(weights, request.ranks, steps)
    group_of = repair_caps(sizes, weights, start.group_of, count, caps.max_tokens, caps.max_sequences)
    if (group_of < 0).any():
        return None
    packed = even_out(Grouping(group_of, count), weights, sizes, caps)
    return even_out_within_steps(
        deal_into_steps(packed, sizes, weights, request, steps, "karmarkar_karp"), sizes, weights, request
    )


def from_longest_first(sizes: Integers, weights: Floats, request: Request, steps: int) -> Schedule | None:
    """A schedule refined from longest first or another method of `pack_into`; None if all fail."""
    count = min(steps * request.ranks, len(sizes))
    if request.caps.padded:
        packed: Grouping | None = pack_evenly(sizes, weights, request.caps, CountRule(count))
    else:
        packed = pack_into(sizes, weights, request.caps, count)
    if packed is None or packed.count > steps * request.ranks:
        return None
    schedule = deal_into_steps(packed, sizes, weights, request, steps, "longest_first")
    return schedule if request.caps.padded else even_out_within_steps(schedule, sizes, weights, request)


def deal_into_steps(
    packed: Grouping, sizes: Integers, weights: Floats, request: Request, steps: int, start: Start
) -> Schedule:
    """Sort micro-batches by weight and deal them into steps."""
    packed = heaviest_first(packed, sizes, computed_weights(packed, weights, request), np.arange(len(sizes)))
    places = _places(packed.count, steps, request.ranks)
    return Schedule(packed.renumbered(places, steps * request.ranks), steps, start)


def computed_weights(grouping: Grouping, weights: Floats, request: Request) -> Floats:
    """float64 [n]: weights as computed; a padded row costs as much as the heaviest of its micro-batch."""
    return grouping.heaviest(weights) if request.caps.padded else weights


def even_out_within_steps(schedule: Schedule, sizes: Integers, weights: Floats, request: Request) -> Schedule:
    """Exchanges between the ranks of each micro-step."""
    group_of = schedule.grouping.group_of.copy()
    loads = schedule.loads(weights)
    for step in np.flatnonzero(loads.max(axis=1) > loads.mean(axis=1) * (1 + TOLERANCE)):
        rows = np.flatnonzero(group_of // request.ranks == step)
        ranks = Grouping(group_of[rows] - step * request.ranks, request.ranks)
        even = even_out(ranks, weights[rows], sizes[rows], request.caps, only_heaviest=True)
        group_of[rows] = even.group_of + step * request.ranks
    return replace(schedule, grouping=Grouping(group_of, schedule.grouping.count))


def _places(groups: int, steps: int, ranks: int) -> Integers:
    """int64 [groups], the micro-batch of each group, in order. Every step has one; the last steps may be incomplete."""
    spare = groups - steps
    in_step = 1 + np.clip(spare - np.arange(steps) * (ranks - 1), 0, ranks - 1)
    before = np.cumsum(in_step) - in_step
    step = np.repeat(np.arange(steps), in_step)
    places: Integers = step * ranks + np.arange(groups) - before[step]
    return places
