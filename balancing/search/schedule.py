"""Schedule a mini-batch: which micro-batches run at the same time, and on which rank.

    sequences --> Karmarkar-Karp, refined (assignment.py) --> at workload / ranks? --> order of steps, ranks
                                                           no: try more, keep the fastest
    more: fill long steps first

All ranks wait for the heaviest micro-batch of a micro-step, so a mini-batch takes the sum over steps of the
heaviest micro-batch: at least workload / ranks, and at least what long sequences force
(`lower_bounds.step_time_bound`).

Filling long steps first:

    longest sequence left --> time limit of the next step --> longest sequences to the lightest rank within it
                              ^------------------------- next step, then the rest is dealt (assignment.py)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from balancing.basics.grouping import Floats, Grouping, Integers
from balancing.search.assignment import (
    Order,
    Request,
    Schedule,
    Start,
    checked_steps,
    computed_weights,
    deal,
    even_out_within_steps,
    from_longest_first,
    repair_caps,
)
from balancing.search.exchange import MANY, TOLERANCE
from balancing.search.filling import fill_to_level
from balancing.search.lower_bounds import StepTimeBound, step_time_bound
from balancing.search.orders import small_ends
from balancing.search.packing import CountRule, pack_in_order

AT_THE_BOUND = 5e-5
"""A first schedule within this share of workload / ranks is final."""
ENOUGH_OF_MANY = 1e-2
"""The same for more than MANY sequences, below the error of a fitted cost model (1.4 %)."""


def schedule_evenly(sizes: Integers, weights: Floats, request: Request) -> Schedule:
    """Return the fastest schedule found. sizes, weights: in descending order of weight, then of size.

    Raises CountError if the counts of `request` cannot be kept.
    """
    best = deal(sizes, weights, request)
    if not request.caps.padded and len(weights) >= best.grouping.count:
        best = fill_long_steps_first(sizes, weights, request, best)
    weights = computed_weights(best.grouping, weights, request)
    return arranged(best, weights, request.order)


def arranged(schedule: Schedule, weights: Floats, order: Order) -> Schedule:
    """Put steps in `order`, and each step's heaviest micro-batches on the ranks with least work so far."""
    return to_ranks(_in_order(schedule, weights, order), weights)


def schedule_in_order(sizes: Integers, request: Request) -> Schedule:
    chunks = np.array_split(np.arange(len(sizes)), request.ranks)
    needed = max(
        len(pack_in_order(sizes[chunk], request.caps, CountRule()))
        for chunk in chunks
        if len(chunk)
    )
    steps = checked_steps(needed, min(len(chunk) for chunk in chunks), len(sizes), request)
    columns = []
    for chunk in chunks:
        filled = CountRule(max(1, min(steps, len(chunk))))
        runs = pack_in_order(sizes[chunk], request.caps, filled) if len(chunk) else []
        columns.append([chunk[start:stop] for start, stop in runs])
    return side_by_side(columns, steps, len(sizes), "none")


def side_by_side(
    columns: Sequence[Sequence[Integers]], steps: int, sequences: int, start: Start
) -> Schedule:
    """Schedule each rank's micro-batches, at most `steps`, in the order given. No step is empty
    on all ranks.
    """
    group_of = np.empty(sequences, np.int64)
    # A rank with fewer micro-batches than steps starts where the one before it ended.
    first = 0
    for rank, column in enumerate(columns):
        for step, rows in zip(
            sorted((first + i) % steps for i in range(len(column))), column, strict=True
        ):
            group_of[rows] = step * len(columns) + rank
        first = (first + len(column)) % steps
    return Schedule(Grouping(group_of, steps * len(columns)), steps, start)


def _in_order(schedule: Schedule, weights: Floats, order: Order) -> Schedule:
    times = schedule.loads(weights).max(axis=1)
    return with_steps(
        schedule,
        small_ends(times) if order == "small_ends" else np.argsort(-times, kind="stable"),
    )


def with_steps(schedule: Schedule, steps: Integers) -> Schedule:
    """Reorder: the i-th micro-step is number `steps[i]` of the given schedule."""
    ranks = schedule.grouping.count // schedule.steps
    numbers = np.argsort(steps)[:, None] * ranks + np.arange(ranks)
    return replace(
        schedule,
        grouping=schedule.grouping.renumbered(numbers.ravel(), schedule.grouping.count),
    )


def to_ranks(schedule: Schedule, weights: Floats) -> Schedule:
    """Within each step, give the heaviest micro-batch to the rank with the least work so far."""
    loads = schedule.loads(weights)
    steps, ranks = loads.shape
    so_far = np.zeros(ranks)
    numbers = np.empty((steps, ranks), np.int64)
    for step in range(steps):
        receivers = np.argsort(so_far, kind="stable")
        heaviest = np.argsort(-loads[step], kind="stable")
        numbers[step, heaviest] = step * ranks + receivers
        so_far[receivers] += loads[step, heaviest]
    return replace(
        schedule,
        grouping=schedule.grouping.renumbered(numbers.ravel(), schedule.grouping.count),
    )


GOOD_ENOUGH = 1e-3
"""A schedule within this share of the lower bound is final."""
LEAST_GAIN = 1e-4
"""Another schedule is computed only if its lower bound is better by this share."""
MOST_LONG_TOGETHER = 4
"""At most so many long sequences share a micro-batch by intent."""


def fill_long_steps_first(
    sizes: Integers, weights: Floats, request: Request, dealt: Schedule
) -> Schedule:
    """Return the best of `dealt` and of schedules whose first steps are filled before the rest is dealt."""
    best = dealt
    lowest = dealt.time(weights)
    many = len(sizes) > MANY
    if lowest <= float(weights.sum()) / request.ranks * (
        1 + (ENOUGH_OF_MANY if many else AT_THE_BOUND)
    ):
        return dealt
    enough = time_bound(sizes, weights, request, dealt.steps).time * (
        1 + (ENOUGH_OF_MANY if many else GOOD_ENOUGH)
    )
    for moves in _VARIANTS:
        if lowest <= enough:
            break
        filling = _Filling(sizes, weights, request, dealt.steps)
        promising = all(
            move(filling) for move in moves
        ) and filling.least_time() < lowest * (1 - LEAST_GAIN)
        candidate = filling.rest_dealt() if promising else None
        if candidate is not None and candidate.time(weights) < lowest:
            best = candidate
            lowest = candidate.time(weights)
    return best


def time_bound(
    sizes: Integers, weights: Floats, request: Request, steps: int
) -> StepTimeBound:
    return step_time_bound(
        sizes,
        weights,
        ranks=request.ranks,
        steps=steps,
        max_tokens=request.caps.max_tokens,
        max_sequences=request.caps.max_sequences,
    )


class _Filling:
    """Fill step after step, longest sequences first. left: int64, ascending, the sequences
    without a place.
    """

    def __init__(
        self, sizes: Integers, weights: Floats, request: Request, steps: int
    ) -> None:
        self.left = np.arange(len(sizes))
        self.steps_left = steps
        self._sizes = sizes
        self._weights = weights
        self._request = request
        self._steps = steps
        self._group_of = np.full(len(sizes), -1, np.int64)
        self._time = 0.0

    def long_steps(self) -> bool:
        """Fill the steps that long sequences prolong according to the lower bound. Return whether any was
        filled.
        """
        return self._longest_with_others(self.bound_of_rest().long_steps)

    def above_fair_share(self) -> bool:
        """Fill steps while the longest sequence left is above the fair share. Return whether any
        was filled.
        """
        while (
            self.steps_left > 1
            and len(self.left)
            and self._weights[self.left[0]] > self._fair_share()
        ):
            self._longest_with_others(1)
        return self.steps_left < self._steps

    def all_steps(self) -> bool:
        return self._longest_with_others(self.steps_left - 1)

    def several_long_together(self) -> bool:
        """Fill steps to the weight of several of the longest sequences together, while almost no
        rank waits.
        """
        steps_before = self.steps_left
        while self.steps_left > 1 and len(self.left):
            row = next(
                (
                    row
                    for row in map(self._row, self._levels_of_several())
                    if self._waits_little(row)
                ),
                None,
            )
            if row is None:
                break
            self._take(row)
        return self.steps_left < steps_before

    def bound_of_rest(self) -> StepTimeBound:
        if len(self.left) == 0:
            return StepTimeBound(0.0, 0)
        return time_bound(
            self._sizes[self.left], self._weights[self.left], self._request, self.steps_left
        )

    def least_time(self) -> float:
        return self._time + self.bound_of_rest().time

    def rest_dealt(self) -> Schedule | None:
        rest = self._rest()
        if rest is None:
            return None
        group_of = self._group_of.copy()
        group_of[self.left] = rest + (self._steps - self.steps_left) * self._request.ranks
        count = self._steps * self._request.ranks
        caps = self._request.caps
        group_of = repair_caps(
            self._sizes, self._weights, group_of, count, caps.max_tokens, caps.max_sequences
        )
        schedule = Schedule(Grouping(group_of, count), self._steps, "longest_with_others")
        return even_out_within_steps(schedule, self._sizes, self._weights, self._request)

    def _longest_with_others(self, steps: int) -> bool:
        for _ in range(min(steps, self.steps_left - 1)):
            if len(self.left):
                self._take(
                    self._row(max(float(self._weights[self.left[0]]), self._fair_share()))
                )
        return self.steps_left < self._steps

    def _rest(self) -> Integers | None:
        if len(self.left) <= self.steps_left * self._request.ranks:
            return np.arange(len(self.left))
        dealt = from_longest_first(
            self._sizes[self.left], self._weights[self.left], self._request, self.steps_left
        )
        return None if dealt is None else dealt.grouping.group_of

    def _fair_share(self) -> float:
        return float(self._weights[self.left].sum()) / (
            self._request.ranks * self.steps_left
        )

    def _levels_of_several(self) -> list[float]:
        longest = self.left[0]
        together = min(
            self._request.caps.max_tokens // int(self._sizes[longest]), MOST_LONG_TOGETHER
        )
        levels = [float(self._weights[longest]) * count for count in range(together, 1, -1)]
        return [level for level in levels if level > self._fair_share()]

    def _row(self, level: float) -> Integers:
        caps = self._request.caps
        limit = level * (1 + TOLERANCE)
        nowhere = np.full(len(self._sizes), -1, np.int64)
        ranks = self._request.ranks
        return fill_to_level(
            self.left,
            self._sizes,
            self._weights,
            nowhere,
            ranks,
            limit,
            caps.max_tokens,
            caps.max_sequences,
        )

    def _loads(self, row: Integers) -> Floats:
        mask = row >= 0
        return Grouping(row[mask], self._request.ranks).sums(self._weights[mask])

    def _waits_little(self, row: Integers) -> bool:
        loads = self._loads(row)
        return bool(loads.max() <= loads.mean() * (1 + GOOD_ENOUGH))

    def _take(self, row: Integers) -> None:
        mask = row >= 0
        self._group_of[mask] = (
            row[mask] + (self._steps - self.steps_left) * self._request.ranks
        )
        self._time += float(self._loads(row).max())
        self.left = self.left[~mask[self.left]]
        self.steps_left -= 1


_VARIANTS: tuple[tuple[Callable[[_Filling], bool], ...], ...] = (
    (_Filling.long_steps,),
    (_Filling.all_steps,),
    (_Filling.several_long_together, _Filling.long_steps),
    (_Filling.several_long_together, _Filling.all_steps),
    (_Filling.above_fair_share, _Filling.several_long_together),
)
"""Moves of `fill_long_steps_first`. A variant is skipped if one of its moves fills no step."""
