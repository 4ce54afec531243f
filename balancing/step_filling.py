"""Fills micro-steps one after another, each up to a time limit of its own, before the rest is dealt.

    longest sequence left --> time limit of the next step --> sequences, longest first, to the lightest rank within it
                              ^------------------------------ next step; at last the rest is dealt (dealing.py)

A sequence above the fair share of a rank prolongs its step in any plan. With micro-batches of equal weight the other
ranks of that step would wait; filled up to the same time, they do not.
"""

from collections.abc import Callable

import numpy as np

from balancing.dealing import Request, Schedule, even_out_within_steps, from_longest_first
from balancing.exchange import TOLERANCE
from balancing.filling import fill_to_level
from balancing.grouping import Floats, Grouping, Integers
from balancing.initial_assignment import repair_caps
from balancing.lower_bounds import StepTimeBound, step_time_bound

GOOD_ENOUGH = 1e-3
"""A schedule within this share of the lower bound is not improved further."""
LEAST_GAIN = 1e-4
"""Another schedule is computed only if its lower bound is better by this share."""
MOST_LONG_TOGETHER = 4
"""At most this many long sequences share a micro-batch by intent."""


def fill_long_steps_first(
    sizes: Integers, weights: Floats, request: Request, dealt: Schedule, bound: float
) -> Schedule:
    """The best of `dealt` and of schedules whose first steps are filled before the rest is dealt.

    `_VARIANTS` are tried in turn until the time is near `bound`.
    """
    best, lowest = dealt, dealt.time(weights)
    enough = bound * (1 + GOOD_ENOUGH)
    for moves in _VARIANTS:
        if lowest <= enough:
            break
        filling = _Filling(sizes, weights, request, dealt.steps)
        promising = all(move(filling) for move in moves) and filling.least_time() < lowest * (1 - LEAST_GAIN)
        other = filling.rest_dealt() if promising else None
        if other is not None and other.time(weights) < lowest:
            best, lowest = other, other.time(weights)
    return best


def time_bound(sizes: Integers, weights: Floats, request: Request, steps: int) -> StepTimeBound:
    """`lower_bounds.step_time_bound` for these sequences in `steps` micro-steps."""
    return step_time_bound(
        sizes,
        weights,
        ranks=request.ranks,
        steps=steps,
        max_tokens=request.caps.max_tokens,
        max_sequences=request.caps.max_sequences,
    )


class _Filling:
    """Fills step after step, longest sequences first. left: int64, ascending, the sequences that have no place yet."""

    def __init__(self, sizes: Integers, weights: Floats, request: Request, steps: int) -> None:
        self.left, self.steps_left = np.arange(len(sizes)), steps
        self._sizes, self._weights, self._request, self._steps = sizes, weights, request, steps
        self._group_of, self._time = np.full(len(sizes), -1, np.int64), 0.0

    def long_steps(self) -> bool:
        """Fill the steps that long sequences prolong according to the lower bound; whether any step is filled."""
        return self._longest_with_others(self.bound_of_rest().long_steps)

    def above_fair_share(self) -> bool:
        """Fill steps while the longest sequence left is above the fair share; whether any step is filled."""
        while self.steps_left > 1 and len(self.left) and self._weights[self.left[0]] > self._fair_share():
            self._longest_with_others(1)
        return self.steps_left < self._steps

    def all_steps(self) -> bool:
        """Fill every step but the last; whether any step is filled."""
        return self._longest_with_others(self.steps_left - 1)

    def several_long_together(self) -> bool:
        """Fill steps to the weight of several of the longest sequences together, while almost no rank waits.

        Returns whether it filled a step.
        """
        before = self.steps_left
        while self.steps_left > 1 and len(self.left):
            row = next((row for row in map(self._row, self._levels_of_several()) if self._waits_little(row)), None)
            if row is None:
                break
            self._take(row)
        return self.steps_left < before

    def bound_of_rest(self) -> StepTimeBound:
        """A lower bound on the time of the sequences that are left in the steps that are left."""
        if len(self.left) == 0:
            return StepTimeBound(0.0, 0)
        return time_bound(self._sizes[self.left], self._weights[self.left], self._request, self.steps_left)

    def least_time(self) -> float:
        """A lower bound on the time of the mini-batch, given the steps that are filled."""
        return self._time + self.bound_of_rest().time

    def rest_dealt(self) -> Schedule | None:
        """The schedule with the rest dealt into the steps that are left; None if it does not fit."""
        rest = self._rest()
        if rest is None:
            return None
        group_of = self._group_of.copy()
        group_of[self.left] = rest + (self._steps - self.steps_left) * self._request.ranks
        count, caps = self._steps * self._request.ranks, self._request.caps
        group_of = repair_caps(self._sizes, self._weights, group_of, count, caps.max_tokens, caps.max_sequences)
        schedule = Schedule(Grouping(group_of, count), self._steps, "longest_with_others")
        return even_out_within_steps(schedule, self._sizes, self._weights, self._request)

    def _longest_with_others(self, steps: int) -> bool:
        """Fill up to `steps` steps, each to the weight of the longest sequence left or to the fair share."""
        for _ in range(min(steps, self.steps_left - 1)):
            if len(self.left):
                self._take(self._row(max(float(self._weights[self.left[0]]), self._fair_share())))
        return self.steps_left < self._steps

    def _rest(self) -> Integers | None:
        """int64, the micro-batch of each sequence that is left, one for each if there are enough micro-batches."""
        if len(self.left) <= self.steps_left * self._request.ranks:
            return np.arange(len(self.left))
        dealt = from_longest_first(self._sizes[self.left], self._weights[self.left], self._request, self.steps_left)
        return None if dealt is None else dealt.grouping.group_of

    def _fair_share(self) -> float:
        return float(self._weights[self.left].sum()) / (self._request.ranks * self.steps_left)

    def _levels_of_several(self) -> list[float]:
        """Weights of as many of the longest as fit together, of one less, down to two, if above the fair share."""
        longest = self.left[0]
        together = min(self._request.caps.max_tokens // int(self._sizes[longest]), MOST_LONG_TOGETHER)
        levels = [float(self._weights[longest]) * count for count in range(together, 1, -1)]
        return [level for level in levels if level > self._fair_share()]

    def _row(self, level: float) -> Integers:
        caps = self._request.caps
        limit = level * (1 + TOLERANCE)
        nowhere, ranks = np.full(len(self._sizes), -1, np.int64), self._request.ranks
        return fill_to_level(
            self.left, self._sizes, self._weights, nowhere, ranks, limit, caps.max_tokens, caps.max_sequences
        )

    def _loads(self, row: Integers) -> Floats:
        taken = row >= 0
        return Grouping(row[taken], self._request.ranks).sums(self._weights[taken])

    def _waits_little(self, row: Integers) -> bool:
        loads = self._loads(row)
        return bool(loads.max() <= loads.mean() * (1 + GOOD_ENOUGH))

    def _take(self, row: Integers) -> None:
        taken = row >= 0
        self._group_of[taken] = row[taken] + (self._steps - self.steps_left) * self._request.ranks
        self._time += float(self._loads(row).max())
        self.left = self.left[~taken[self.left]]
        self.steps_left -= 1


_VARIANTS: tuple[tuple[Callable[[_Filling], bool], ...], ...] = (
    (_Filling.long_steps,),
    (_Filling.all_steps,),
    (_Filling.several_long_together, _Filling.long_steps),
    (_Filling.several_long_together, _Filling.all_steps),
    (_Filling.above_fair_share, _Filling.several_long_together),
)
"""Moves of `fill_long_steps_first`; a variant is skipped if one of its moves fills no step."""
