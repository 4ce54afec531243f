"""Assign sequences to micro-batches, and these, sorted by weight, to micro-steps, `ranks` to each.

    sequences --+-- Karmarkar-Karp, repaired -------+--> exchanges --> sorted, dealt --> exchanges
                +-- longest first (packing.py) -----+    of all        into steps        within each step

Karmarkar-Karp balances workload and ignores caps, so sequences above a cap move to micro-batches with room.
Longest first is the fallback if that fails. All ranks of a step wait for the heaviest, and sorted neighbours
differ least.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from balancing.basics.compiled import compiled
from balancing.basics.grouping import Caps, Floats, Grouping, Integers, listed
from balancing.errors import CountError
from balancing.search.exchange import EFFORT, MANY, even_out, tolerance_of
from balancing.search.filling import fill_to_level
from balancing.search.packing import (
    CountRule,
    fewest_by_best_fit,
    fewest_micro_batches,
    heaviest_first,
    most_by_best_fit,
    pack_evenly,
    pack_into,
)
from balancing.search.partition import karmarkar_karp, largest_differencing

Order = Literal["descending", "small_ends", "makespan"]
Start = Literal[
    "karmarkar_karp", "longest_first", "longest_with_others", "pipeline_shape", "shared_prefixes",
    "none", "verl", "roll", "mindspeed_rl",
]  # fmt: skip
"""Initial assignment that a schedule was refined from, or the algorithm of an unrefined plan."""

STEPS_TRIED = 8
"""Packing tries so many numbers of micro-steps from the lower bound on, then the number of
best-fit-decreasing.

Of many sequences only the last: they have many steps, and one more takes no more time.
"""


@dataclass(frozen=True)
class Request:
    """Constraints of a schedule. count: micro-batches on each rank."""

    ranks: int
    caps: Caps
    count: CountRule
    allow_empty: bool
    order: Order


@dataclass(frozen=True, eq=False)
class Schedule:
    """grouping: the micro-batch of each sequence. Micro-batch `step * ranks + rank` belongs to that rank."""

    grouping: Grouping
    steps: int
    start: Start

    def loads(self, weights: Floats) -> Floats:
        """Return the weight of each micro-batch: float64 [steps, ranks]."""
        return self.grouping.sums(weights).reshape(self.steps, -1)

    def time(self, weights: Floats) -> float:
        return float(self.loads(weights).max(axis=1).sum())


def checked_steps(
    needed: int, fewest_on_a_rank: int, sequences: int, request: Request
) -> int:
    """Count micro-steps. Raises CountError if a step, or without `allow_empty` a micro-batch,
    would be empty.
    """
    steps = request.count.at_least(needed, sequences)
    if not request.allow_empty and steps > fewest_on_a_rank:
        raise CountError(
            f"a mini-batch of {sequences} sequences cannot fill {steps} micro-batches on each of "
            f"{request.ranks} ranks. Set allow_empty=True, or lower ranks, min_count or multiple_of."
        )
    return steps


def deal(sizes: Integers, weights: Floats, request: Request) -> Schedule:
    """Return the schedule with the fewest steps found, from Karmarkar-Karp if possible, else from longest
    first.
    """
    for steps in _steps_to_try(sizes, request):
        schedule = from_karmarkar_karp(sizes, weights, request, steps)
        schedule = schedule or from_longest_first(sizes, weights, request, steps)
        if schedule is not None:
            return schedule
    raise RuntimeError(
        "best-fit-decreasing found no place in its own number of micro-batches. This is a defect."
    )


def _steps_to_try(sizes: Integers, request: Request) -> Iterator[int]:
    ranks = request.ranks
    sequences = len(sizes)
    lowest = -(-fewest_micro_batches(sizes, request.caps) // ranks)
    attempts = STEPS_TRIED if sequences <= MANY else 0
    multiple = request.count.multiple_of
    for needed in range(lowest, lowest + attempts * multiple, multiple):
        yield checked_steps(needed, sequences // ranks, sequences, request)
    if not request.caps.padded and most_by_best_fit(sizes, request.caps) > lowest * ranks:
        lowest = -(-fewest_by_best_fit(sizes, request.caps) // ranks)
    yield checked_steps(lowest, sequences // ranks, sequences, request)


def from_karmarkar_karp(
    sizes: Integers, weights: Floats, request: Request, steps: int
) -> Schedule | None:
    """Refine a schedule from Karmarkar-Karp. Returns None for the padded layout, or if the caps cannot be
    repaired.
    """
    count = steps * request.ranks
    caps = request.caps
    if caps.padded or len(sizes) < count:
        return None
    start = karmarkar_karp_twice(weights, request.ranks, steps)
    group_of = repair_caps(
        sizes, weights, start.group_of, count, caps.max_tokens, caps.max_sequences
    )
    if (group_of < 0).any():
        return None
    packed = Grouping(group_of, count)
    if len(sizes) <= MANY:  # for more, exchanges within steps suffice
        packed = even_out(packed, weights, sizes, caps)
    return even_out_within_steps(
        deal_into_steps(packed, sizes, weights, request, steps, "karmarkar_karp"),
        sizes,
        weights,
        request,
    )


def from_longest_first(
    sizes: Integers, weights: Floats, request: Request, steps: int
) -> Schedule | None:
    """Refine a schedule from longest first or another method of `pack_into`. Returns None if all fail."""
    count = min(steps * request.ranks, len(sizes))
    if request.caps.padded:
        packed: Grouping | None = pack_evenly(
            sizes, weights, request.caps, CountRule(count)
        )
    else:
        packed = pack_into(sizes, weights, request.caps, count)
    if packed is None or packed.count > steps * request.ranks:
        return None
    schedule = deal_into_steps(packed, sizes, weights, request, steps, "longest_first")
    return (
        schedule
        if request.caps.padded
        else even_out_within_steps(schedule, sizes, weights, request)
    )


def deal_into_steps(
    packed: Grouping,
    sizes: Integers,
    weights: Floats,
    request: Request,
    steps: int,
    start: Start,
) -> Schedule:
    packed = heaviest_first(
        packed, sizes, computed_weights(packed, weights, request), np.arange(len(sizes))
    )
    places = _places(packed.count, steps, request.ranks)
    return Schedule(packed.renumbered(places, steps * request.ranks), steps, start)


def computed_weights(grouping: Grouping, weights: Floats, request: Request) -> Floats:
    """Return weights as computed: a padded row costs as much as the heaviest of its micro-batch."""
    return grouping.heaviest(weights) if request.caps.padded else weights


def even_out_within_steps(
    schedule: Schedule,
    sizes: Integers,
    weights: Floats,
    request: Request,
    tolerance: float | None = None,
    effort: int = EFFORT,
) -> Schedule:
    group_of = schedule.grouping.group_of.copy()
    loads = schedule.loads(weights)
    enough = loads.mean(axis=1) * (
        1 + (tolerance_of(len(sizes)) if tolerance is None else tolerance)
    )
    rows_of = Grouping(group_of // request.ranks, schedule.steps).members()
    for step in np.flatnonzero(loads.max(axis=1) > enough):
        rows = rows_of[step]
        ranks = Grouping(group_of[rows] - step * request.ranks, request.ranks)
        target = float(enough[step])
        even = even_out(
            ranks,
            weights[rows],
            sizes[rows],
            request.caps,
            only_heaviest=True,
            target=target,
            effort=effort,
        )
        group_of[rows] = even.group_of + step * request.ranks
    return replace(schedule, grouping=Grouping(group_of, schedule.grouping.count))


def _places(groups: int, steps: int, ranks: int) -> Integers:
    spare = groups - steps
    in_step = 1 + np.clip(spare - np.arange(steps) * (ranks - 1), 0, ranks - 1)
    offsets = np.cumsum(in_step) - in_step
    step = np.repeat(np.arange(steps), in_step)
    places: Integers = step * ranks + np.arange(groups) - offsets[step]
    return places


def karmarkar_karp_twice(weights: Floats, ranks: int, steps: int) -> Grouping:
    """Make `steps` micro-batches for each rank by Karmarkar-Karp alone, without caps, each rank's heaviest
    first.

    weights: float64 [n], descending. A rank with fewer sequences than steps has empty micro-batches.
    """
    rank_of = karmarkar_karp(weights, ranks)
    return Grouping(split_ranks(weights, rank_of, ranks, steps), steps * ranks)


@compiled
def split_ranks(weights: Floats, rank_of: Integers, ranks: int, steps: int) -> Integers:
    """Split each rank's sequences into `steps` sets. Returns int64 [n], `step * ranks + rank` of each
    sequence.
    """
    group_of = np.empty(len(weights), np.int64)
    order, bounds = listed(rank_of, ranks)
    for rank in range(ranks):
        rows = order[bounds[rank] : bounds[rank + 1]]
        if steps == 1 or len(rows) <= steps:
            set_of = np.arange(len(rows)) % steps
        else:
            set_of = largest_differencing(weights[rows], steps, False)
        heaviest_first = np.argsort(
            -np.bincount(set_of, weights[rows], steps), kind="mergesort"
        )
        group_of[rows] = np.argsort(heaviest_first, kind="mergesort")[set_of] * ranks + rank
    return group_of


@compiled
def repair_caps(
    sizes: Integers,
    weights: Floats,
    group_of: Integers,
    count: int,
    max_tokens: int,
    max_sequences: int,
) -> Integers:
    """Bring non-empty groups within the caps. Returns int64 [n], -1 for a sequence that fits nowhere.

    Sequences above a cap move, longest first, to the lightest group with room. An empty group takes the
    lightest sequence of the group with most sequences. weights: descending.
    """
    assignment = group_of.copy()
    tokens = np.bincount(group_of, sizes, count)
    counts = np.bincount(group_of, minlength=count)
    order, bounds = listed(group_of, count)
    for group in range(count):
        if tokens[group] > max_tokens or counts[group] > max_sequences:
            _take_out_excess(
                assignment,
                order[bounds[group] : bounds[group + 1]],
                sizes,
                max_tokens,
                max_sequences,
            )
    loose = np.flatnonzero(assignment < 0)
    loose = loose[np.argsort(-sizes[loose], kind="mergesort")]
    repaired = fill_to_level(
        loose, sizes, weights, assignment, count, np.inf, max_tokens, max_sequences
    )
    if (repaired < 0).any():
        return repaired
    counts = np.bincount(repaired, minlength=count)
    for group in np.flatnonzero(counts == 0):
        largest = np.argmax(counts)
        repaired[np.flatnonzero(repaired == largest)[-1]] = group
        counts[largest] -= 1
        counts[group] = 1
    return repaired


@compiled
def _take_out_excess(
    group_of: Integers,
    members: Integers,
    sizes: Integers,
    max_tokens: int,
    max_sequences: int,
) -> None:
    """Take out (-1) the shortest member that brings its group within the caps, else the longest,
    until it is.
    """
    excess = sizes[members].sum() - max_tokens
    count = len(members)
    while excess > 0 or count > max_sequences:
        leaving = -1
        for sequence in members:
            if group_of[sequence] < 0:
                continue
            if leaving < 0:
                better = True
            elif sizes[leaving] >= excess:
                better = excess <= sizes[sequence] < sizes[leaving]
            else:
                better = sizes[sequence] > sizes[leaving]
            if better:
                leaving = sequence
        group_of[leaving] = -1
        excess -= sizes[leaving]
        count -= 1
