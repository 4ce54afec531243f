"""The fastest schedule of groups that share beginnings, of those that fillings and exchanges make.

groups --> Karmarkar-Karp (shared_dealing.py) --> exchanges (shared_exchange.py) --> near the lower bound? done
groups, in several orders --> the lowest level up to which they fill all micro-batches (shared_filling.py)
  --> exchanges --> sorted, dealt into micro-steps (dealing.py) --> near the lower bound? done
where the first order ends far from it:
groups, annealed into pairs of micro-batches of more and more unequal levels (shared_pairing.py)
  --> exchanges and sorting by turns --> dealt into micro-steps
"""

from collections.abc import Iterator

import numpy as np

from balancing.dealing import Request, Schedule, Start, checked_steps, deal_into_steps
from balancing.errors import CountError
from balancing.grouping import Floats, Grouping, Integers
from balancing.shared_bounds import fewest_parts, least_step_times, shared_step_time_bound, work_of_groups
from balancing.shared_dealing import deal_groups
from balancing.shared_exchange import exchange_shared
from balancing.shared_filling import Groups, fill_groups
from balancing.shared_pairing import fill_pairs

CHEAPEST = (0.0, 0.1, 0.2, 0.4, 1.0)
"""Orders: the groups with the cheapest beginnings, up to these shares of the work, are placed last, as filling."""
NEAR = 3e-3
"""A schedule within this share of the lower bound is final."""
FAR = 1e-2
"""More micro-steps than the fewest are tried if no schedule is within this share of the lower bound."""
MORE_STEPS = 2
"""This many numbers of micro-steps above the fewest are tried."""
FINE = 3e-3
"""Levels are told apart by this share, and by this share of what they are above the lower bound:"""
RELATIVE = 0.125
EFFORT = 500_000
"""Exchanges compare this many pairs of bundles over all orders, about 2 ms of compiled code,"""
EFFORT_EACH = 2_000
"""and this many more for each sequence;"""
FIRST = 4
"""of which the schedule of pieces of groups (shared_dealing.py) gets one in so many."""
FEW_CUTS = 8e-3
"""Pairs are tried until a schedule is within this share of the lower bound. It is their first aim;"""
CLOSER = 0.6
"""later ones are this share of what the best schedule is above the bound."""
SPREADS = (0.0, 0.055, 0.11)
"""Levels of the first and the last micro-step are above and below the mean by this share, in one try each;"""
PAIRED = 3
"""there are at most this many, for all numbers of micro-steps,"""
EFFORT_PAIRED = 250
"""each with so much effort for a sequence, beside that of `EFFORT_EACH`,"""
ROUNDS = 3
"""in so many turns."""


def fastest_of_groups(groups: Groups, request: Request) -> Schedule | None:
    """The fastest schedule found, of the sequences in the order of `groups`; None if none is found.

    It has about as few micro-steps as the caps allow. Groups are cut into parts where a micro-batch is full.
    """
    return _Search(groups, request).fastest()


def computed_by(groups: Groups, micro_batch_of: Integers) -> Floats:
    """float64 [n]: the work of each sequence; the first of a group in a micro-batch computes the beginning.

    micro_batch_of: int64 [n].
    """
    work = groups.own.copy()
    first = np.unique(micro_batch_of * len(groups.shared) + groups.group, return_index=True)[1]
    work[first] += groups.shared[groups.group[first]]
    return work


class _Search:
    def __init__(self, groups: Groups, request: Request) -> None:
        self._groups, self._request = groups, request
        self._effort = EFFORT + EFFORT_EACH * len(groups.own)
        self._best: Schedule | None = None
        self._paired = 0
        self._time = self._filled_time = np.inf  # of the best schedule, and of the lowest level of any filling

    def fastest(self) -> Schedule | None:
        for attempt, steps in enumerate(self._steps()):
            bound = shared_step_time_bound(self._groups, self._request.ranks, steps, self._request.caps).time
            if self._time <= bound * (1 + FAR):
                break
            forced = self._forced(steps)
            if self._best is None:
                self._begin(bound / steps)
                if self._time <= bound * (1 + NEAR):
                    return self._best
            for place, order in enumerate(self._orders(bound / steps)):
                self._try(order, forced, bound)
                if place == 0 and self._pair(forced, bound) and self._time <= bound * (1 + FAR):
                    break
                if not np.isfinite(self._filled_time) and (attempt > 0 or self._effort <= 0):
                    break  # where one order does not fit, others seldom do, and each takes long
                if self._time <= bound * (1 + NEAR) or self._effort <= 0:
                    return self._best
        return self._best

    def _begin(self, level: float) -> None:
        """Karmarkar-Karp over the groups, and exchanges from there."""
        found = deal_groups(self._groups, self._request, level)
        if found is None:
            return
        self._keep(found)
        micro_batch_of = self._heaviest_first(np.unique(found.grouping.group_of, return_inverse=True)[1])
        bound = shared_step_time_bound(self._groups, self._request.ranks, found.steps, self._request.caps).time
        aim = self._levels(self._forced(found.steps), bound * (1 + NEAR / 2))
        self._effort -= self._exchange(micro_batch_of, aim, found.steps, found.start, self._effort // FIRST)[1]

    def _steps(self) -> Iterator[int]:
        """Numbers of micro-steps, upwards from a lower bound; none that the counts do not allow."""
        groups, request, sequences = self._groups, self._request, len(self._groups.own)
        tokens = int(groups.own_tokens.sum() + fewest_parts(groups, request.caps) @ groups.shared_tokens)
        fewest = max(-(-tokens // request.caps.max_tokens), -(-sequences // request.caps.max_sequences))
        lowest, multiple = -(-fewest // request.ranks), request.count.multiple_of
        for needed in range(lowest, lowest + (MORE_STEPS + 1) * multiple, multiple):
            try:
                yield checked_steps(needed, sequences // request.ranks, sequences, request)
            except CountError:
                return

    def _forced(self, steps: int) -> Floats:
        """float64 [steps]: lower bounds on the times of the longest step, the second longest, and so on."""
        found = least_step_times(self._groups, self._request.ranks, steps, self._request.caps)
        return np.pad(found, (0, steps - len(found)))

    def _orders(self, level: float) -> Iterator[Integers]:
        """int64 [G]: the largest remainders first, then heaviest groups first, but the cheapest beginnings last.

        Remainder: what a group has left when it has filled as many micro-batches of this level as it can.
        """
        shared, own = self._groups.shared, work_of_groups(self._groups)
        room = np.maximum(level - shared, 1e-9 * level)
        yield np.argsort(-np.fmod(own, room) - shared, kind="stable")
        ascending = np.argsort(shared, kind="stable")
        for share in CHEAPEST:
            last = np.zeros(len(own), np.bool_)
            last[ascending] = np.cumsum(own[ascending]) <= share * own.sum()
            yield np.lexsort((np.where(last, -shared, -own - shared), last))

    def _try(self, order: Integers, forced: Floats, bound: float) -> None:
        """Fill in this order and exchange, and keep the schedule if it is the fastest."""
        filled = self._lowest(order, forced, bound)
        if filled is None:
            return
        aim = self._levels(forced, bound * (1 + NEAR / 2))
        self._effort -= self._exchange(filled, aim, len(forced), "shared_prefixes", self._effort)[1]

    def _pair(self, forced: Floats, bound: float) -> bool:
        """Fill pairs of micro-batches, the levels of micro-steps more and more spread, and exchange: whether it helps.

        Not under a cap on sequences, which pairs do not know, and not where sequences prolong a step by force.
        """
        if self._request.caps.max_sequences < len(self._groups.own):
            return False
        before, above = self._time, FEW_CUTS
        for spread in SPREADS if len(forced) > 1 else SPREADS[:1]:
            level = self._levels(forced, bound * (1 + above))
            if self._time <= bound * (1 + FEW_CUTS) or self._paired == PAIRED or forced[0] >= level[0]:
                break
            aim = level * (1 + spread * np.repeat(np.linspace(1, -1, len(forced)), self._request.ranks))
            filled = fill_pairs(self._groups, aim, self._request.caps)
            if filled is None:
                break
            self._paired += 1
            effort = EFFORT_PAIRED * len(filled)
            for _ in range(ROUNDS):
                filled, spent = self._exchange(
                    self._heaviest_first(filled), aim, len(forced), "shared_prefixes", effort
                )
                effort -= spent
            above = max(FEW_CUTS, (self._time / bound - 1) * CLOSER)
        return self._time < before

    def _exchange(self, filled: Integers, aim: Floats, steps: int, start: Start, effort: int) -> tuple[Integers, int]:
        """Exchange towards `aim`, and keep the schedule if it is the fastest.

        filled: int64 [n], micro-batches, heaviest first. Returns them after the exchanges, and the effort spent.
        """
        caps = self._request.caps
        filled = _spread(filled, steps if self._request.allow_empty else len(aim), len(aim))
        filled, left = exchange_shared(self._groups, filled, aim, caps.max_tokens, caps.max_sequences, effort)
        self._keep(self._dealt(filled, steps, start))
        return filled, effort - left

    def _heaviest_first(self, micro_batch_of: Integers) -> Integers:
        """int64 [n]: micro-batches numbered from the heaviest on."""
        loads = np.bincount(micro_batch_of, computed_by(self._groups, micro_batch_of))
        numbers: Integers = np.argsort(np.argsort(-loads, kind="stable"), kind="stable")[micro_batch_of]
        return numbers

    def _keep(self, schedule: Schedule) -> None:
        time = schedule.time(computed_by(self._groups, schedule.grouping.group_of))
        if time < self._time:
            self._best, self._time = schedule, time

    def _lowest(self, order: Integers, forced: Floats, bound: float) -> Integers | None:
        """int64 [n], the micro-batches of the shortest time above `bound` that fits; None if none is below the best."""
        work = float(computed_by(self._groups, np.arange(len(self._groups.own))).sum())  # enough for any micro-batch
        longest = self._filled_time if np.isfinite(self._filled_time) else bound + len(forced) * work
        best = self._fill(order, self._levels(forced, longest))
        if best is None:
            return None
        low, high, excess = 0.0, longest / bound - 1, FINE
        while excess < high and high - low > max(FINE, RELATIVE * high):
            found = self._fill(order, self._levels(forced, bound * (1 + excess)))
            if found is None:
                low = excess
            else:
                best, high = found, excess
            excess = min(2 * excess, (low + high) / 2)
        self._filled_time = bound * (1 + high)
        return best

    def _levels(self, forced: Floats, time: float) -> Floats:
        """float64 [M]: the times of steps that add up to `time`, all the same unless they are longer by force."""
        return np.repeat(np.maximum(forced, _common_level(time, forced)), self._request.ranks)

    def _fill(self, order: Integers, levels: Floats) -> Integers | None:
        caps = self._request.caps
        filled = fill_groups(self._groups, order, levels, caps.max_tokens, caps.max_sequences)
        return None if (filled < 0).any() else filled

    def _dealt(self, micro_batch_of: Integers, steps: int, start: Start) -> Schedule:
        """Micro-batches sorted by weight and dealt into steps; empty ones come last."""
        used, numbers = np.unique(micro_batch_of, return_inverse=True)
        work = computed_by(self._groups, micro_batch_of)
        packed = Grouping(numbers, len(used))
        return deal_into_steps(packed, self._groups.own_tokens, work, self._request, steps, start)


def _common_level(time: float, forced: Floats) -> float:
    """The level L for which the maxima of L and of `forced`, float64 [steps], descending, add up to `time`."""
    steps, longer = len(forced), np.concatenate([[0.0], np.cumsum(forced)[:-1]])
    levels = (time - longer) / (steps - np.arange(steps))
    return float(levels[np.argmax(forced <= levels)]) if (forced <= levels).any() else float(levels[-1])


def _spread(micro_batch_of: Integers, needed: int, count: int) -> Integers:
    """At least `needed` of `count` micro-batches with a sequence; empty ones take one from those with most of them."""
    micro_batch_of, sizes = micro_batch_of.copy(), np.bincount(micro_batch_of, minlength=count)
    for empty in np.flatnonzero(sizes == 0)[: max(0, needed - np.count_nonzero(sizes))]:
        fullest = np.argmax(sizes)
        micro_batch_of[np.flatnonzero(micro_batch_of == fullest)[-1]] = empty
        sizes[fullest] -= 1
        sizes[empty] = 1
    return micro_batch_of
