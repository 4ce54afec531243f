"""The fastest schedule of groups that share beginnings, of those that fillings and exchanges make.

groups --> Karmarkar-Karp (shared_dealing.py) --> exchanges (shared_exchange.py) --> near the lower bound? done
groups, in several orders --> the lowest level up to which they fill all micro-batches (shared_filling.py)
  --> exchanges --> sorted, dealt into micro-steps (dealing.py) --> near the lower bound? done
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
            for order in self._orders(bound / steps):
                self._try(order, forced, bound)
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
        self._effort -= self._exchange(micro_batch_of, aim, found.steps, found.start, self._effort // FIRST)

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
        self._effort -= self._exchange(filled, aim, len(forced), "shared_prefixes", self._effort)

    def _exchange(self, filled: Integers, aim: Floats, steps: int, start: Start, effort: int) -> int:
        """Exchange towards `aim`, keep the schedule if it is the fastest, and return the effort spent.

        filled: int64 [n], micro-batches, heaviest first.
        """
        caps = self._request.caps
        filled = _spread(filled, steps if self._request.allow_empty else len(aim), len(aim))
        filled, left = exchange_shared(self._groups, filled, aim, caps.max_tokens, caps.max_sequences, effort)
        self._keep(self._dealt(filled, steps, start))
        return effort - left

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
