"""Schedule sequences that share prefixes: each micro-batch computes a prefix once.

    whole groups --> Karmarkar-Karp (assignment.py) --> near the lower bound? done
    groups, largest remainders first --> the lowest level up to which they fill all micro-batches   (fill_groups)
      --> exchanges between micro-batches --> sorted, dealt into micro-steps                         (exchange_prefixes)

A whole group computes its prefix once. Each part of a divided group computes it again, but parts fit under the cap and
even out the micro-batches. Sequences that share more than their prefix are also planned as subtrees (prefixes.py).

    work of a group of lengths L_i with a prefix of P:    W(P) + sum_i (W(L_i) - W(P)),  W(L) = a L + b L^2

Filling is McNaughton's wrap-around rule (1959) with a price on every cut: a group is cut only where a micro-batch is
full. n sequences by group, each group from its heaviest on. G groups, M micro-batches.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancing.assignment import Request, Schedule, checked_steps, deal, deal_into_steps
from balancing.compiled import compiled
from balancing.errors import CountError
from balancing.exchange import LinkedGroups, link, members_of, next_lightest, relink
from balancing.grouping import Floats, Grouping, Integers
from balancing.lower_bounds import fewest_parts, prefix_step_time_bound, prefix_step_times
from balancing.prefixes import Groups, SharedPrefixes, subtrees
from balancing.schedule import arranged, schedule_evenly

NEAR_THE_LEAST = 1e-2
"""Other subtrees are not tried within this share of computing every token once, spread evenly."""
NEAR = 3e-3
"""Whole groups are final within this share of the lower bound."""
FAR = 1e-2
"""More micro-steps than the fewest are tried if no schedule is within this share of the lower bound."""
MORE_STEPS = 2
AIM = 1.5e-3
"""Exchanges aim at this share above the lower bound."""
FINE, RELATIVE = 3e-3, 0.125
"""Levels differ by this share, and by this share of their excess over the lower bound."""
EFFORT, EFFORT_EACH = 500_000, 2_000
"""Exchanges compare so many pairs of bundles, about 2 ms of compiled code, and so many more per sequence."""
STARTS = 8
"""A cut fills room from the heaviest, the second heaviest, ... sequence on: so many tries."""
PARTNERS = 6
"""A heavy micro-batch tries so many of the lightest ones, and those that hold sequences of the same groups."""
LEAST_GAIN = 3e-4
"""An exchange must make the heavier micro-batch lighter by this share."""
FAILURES = 64
"""Exchanges end after so many micro-batches that no exchange makes lighter."""


def schedule_with_prefixes(sizes: Integers, weights: Floats, prefixes: SharedPrefixes, request: Request) -> Schedule:
    """Return the fastest schedule found; raises as `schedule_evenly` does.

    sizes: int64 [n], tokens. weights: float64 [n], each of a sequence alone, descending.
    """
    of_prompts = replace(prefixes, tree=None)
    least, least_of_prompts = (_least(weights, each, request) for each in (prefixes, of_prompts))
    best, time = None, np.inf
    # A cap on sequences would count a subtree as one.
    capped = request.caps.max_sequences < len(sizes)
    for each in () if capped else subtrees(sizes, weights, prefixes, request.caps.max_tokens, least):
        if time <= max(_least(each.weights, each.prefixes, request), least * (1 + NEAR_THE_LEAST)):
            break
        try:
            found = _in_groups(each.sizes, each.weights, each.prefixes, request)
        except CountError:
            continue
        found = replace(found, grouping=Grouping(found.grouping.group_of[each.of], found.grouping.count))
        if found.time(prefixes.computed(weights, found.grouping.group_of)) < time:
            best, time = found, found.time(prefixes.computed(weights, found.grouping.group_of))
    if best is not None and time <= least_of_prompts:  # single sequences would have to meet by chance
        return best
    alone = _in_groups(sizes, weights, of_prompts, request)
    if best is None or alone.time(prefixes.computed(weights, alone.grouping.group_of)) < time:
        return alone
    return best


def _least(weights: Floats, prefixes: SharedPrefixes, request: Request) -> float:
    """Return a rank's work if every token were computed once, spread evenly over the ranks."""
    return float(prefixes.computed(weights, np.zeros_like(prefixes.group)).sum()) / request.ranks


def _in_groups(sizes: Integers, weights: Floats, prefixes: SharedPrefixes, request: Request) -> Schedule:
    groups, rows = prefixes.in_groups(sizes, weights)
    found = _Filling(groups, request).fastest()
    if found is not None:
        group_of = np.empty_like(rows)
        group_of[rows] = found.grouping.group_of
        found = replace(found, grouping=Grouping(group_of, found.grouping.count))
        computed = prefixes.computed(weights, group_of)
        if found.time(computed) <= float(weights.sum()) / request.ranks:
            return arranged(found, computed, request.order)
    alone = schedule_evenly(sizes, weights, request)
    schedules = [alone] if found is None else [found, alone]
    work = [prefixes.computed(weights, each.grouping.group_of) for each in schedules]
    best = min(range(len(work)), key=lambda number: schedules[number].time(work[number]))
    return arranged(schedules[best], work[best], request.order)


class _Filling:
    """Fill micro-batches with groups, in about as few micro-steps as the caps allow."""

    def __init__(self, groups: Groups, request: Request) -> None:
        self._groups, self._request = groups, request
        self._effort = EFFORT + EFFORT_EACH * len(groups.own)
        self._lowest_time = np.inf

    def fastest(self) -> Schedule | None:
        """Return the fastest schedule found, in the order of `groups`; None if nothing fits."""
        caps, ranks, near = self._request.caps, self._request.ranks, NEAR
        best = self._whole_groups()
        time = np.inf if best is None else best.time(self._computed(best.grouping.group_of))
        for steps in self._steps():
            bound = prefix_step_time_bound(self._groups, ranks, steps, caps.max_tokens, caps.max_sequences).time
            if time <= bound * (1 + near) or self._effort <= 0:
                break
            near = FAR
            times = prefix_step_times(self._groups, ranks, steps, caps.max_tokens, caps.max_sequences)
            forced = np.pad(times, (0, steps - len(times)))
            filled = self._lowest(self._order(bound / steps), forced, bound)
            if filled is None:
                continue
            aim = self._levels(forced, bound * (1 + AIM))
            filled = _spread(filled, steps if self._request.allow_empty else len(aim), len(aim))
            filled, self._effort = exchange_prefixes(
                self._groups, filled, aim, caps.max_tokens, caps.max_sequences, self._effort
            )
            found = self._dealt(filled, steps)
            found_time = found.time(self._computed(found.grouping.group_of))
            if found_time < time:
                best, time = found, found_time
        return best

    def _whole_groups(self) -> Schedule | None:
        groups, caps = self._groups, self._request.caps
        work = np.add.reduceat(groups.own, groups.start[:-1]) + groups.shared
        tokens = np.add.reduceat(groups.own_tokens, groups.start[:-1]) + groups.shared_tokens
        if tokens.max() > caps.max_tokens or caps.max_sequences < len(groups.own):
            return None
        order = np.lexsort((-tokens, -work))
        try:
            found = deal(tokens[order], work[order], self._request)
        except CountError:
            return None
        group_of = np.empty(len(order), np.int64)
        group_of[order] = found.grouping.group_of
        return replace(found, grouping=Grouping(group_of[groups.group], found.grouping.count))

    def _steps(self) -> Iterator[int]:
        groups, request, sequences = self._groups, self._request, len(self._groups.own)
        parts = fewest_parts(groups, request.caps.max_tokens, request.caps.max_sequences)
        tokens = int(groups.own_tokens.sum() + parts @ groups.shared_tokens)
        fewest = max(-(-tokens // request.caps.max_tokens), -(-sequences // request.caps.max_sequences))
        lowest, multiple = -(-fewest // request.ranks), request.count.multiple_of
        for needed in range(lowest, lowest + (MORE_STEPS + 1) * multiple, multiple):
            try:
                yield checked_steps(needed, sequences // request.ranks, sequences, request)
            except CountError:
                return

    def _order(self, level: float) -> Integers:
        """Put groups first that leave most after filling as many micro-batches as they can: int64 [G]."""
        own = np.add.reduceat(self._groups.own, self._groups.start[:-1])
        room = np.maximum(level - self._groups.shared, 1e-9 * level)
        return np.argsort(-np.fmod(own, room) - self._groups.shared, kind="stable")

    def _computed(self, micro_batch_of: Integers) -> Floats:
        work = self._groups.own.copy()
        keys = micro_batch_of * len(self._groups.shared) + self._groups.group
        first = np.unique(keys, return_index=True)[1]
        work[first] += self._groups.shared[self._groups.group[first]]
        return work

    def _lowest(self, order: Integers, forced: Floats, bound: float) -> Integers | None:
        """Return the micro-batches of the shortest time above `bound` that fits; None if no time is below the best."""
        work = float(self._computed(np.arange(len(self._groups.own))).sum())  # enough for any micro-batch
        longest = self._lowest_time if np.isfinite(self._lowest_time) else bound + len(forced) * work
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
        self._lowest_time = bound * (1 + high)
        return best

    def _levels(self, forced: Floats, time: float) -> Floats:
        """Split `time` into equal step times, except for steps that must be longer: float64 [M]."""
        steps, longer = len(forced), np.concatenate([[0.0], np.cumsum(forced)[:-1]])
        levels = (time - longer) / (steps - np.arange(steps))
        level = levels[np.argmax(forced <= levels)] if (forced <= levels).any() else levels[-1]
        return np.repeat(np.maximum(forced, level), self._request.ranks)

    def _fill(self, order: Integers, levels: Floats) -> Integers | None:
        caps = self._request.caps
        filled = fill_groups(self._groups, order, levels, caps.max_tokens, caps.max_sequences)
        return None if (filled < 0).any() else filled

    def _dealt(self, micro_batch_of: Integers, steps: int) -> Schedule:
        used, numbers = np.unique(micro_batch_of, return_inverse=True)
        work, packed = self._computed(micro_batch_of), Grouping(numbers, len(used))
        return deal_into_steps(packed, self._groups.own_tokens, work, self._request, steps, "shared_prefixes")


def _spread(micro_batch_of: Integers, needed: int, count: int) -> Integers:
    """Fill at least `needed` of `count` micro-batches; empty ones take a sequence from the fullest."""
    micro_batch_of, sizes = micro_batch_of.copy(), np.bincount(micro_batch_of, minlength=count)
    for empty in np.flatnonzero(sizes == 0)[: max(0, needed - np.count_nonzero(sizes))]:
        fullest = np.argmax(sizes)
        micro_batch_of[np.flatnonzero(micro_batch_of == fullest)[-1]] = empty
        sizes[fullest] -= 1
        sizes[empty] = 1
    return micro_batch_of


class _Room(NamedTuple):
    """Room left in each micro-batch. load: float64 [M]. tokens, sequences: int64 [M]."""

    load: Floats
    tokens: Integers
    sequences: Integers


@compiled
def fill_groups(groups: Groups, order: Integers, levels: Floats, max_tokens: int, max_sequences: int) -> Integers:
    """Place whole groups in the fullest micro-batch with room; divide a group over the emptiest if none has room.

    order: int64 [G]. levels: float64 [M], descending, the most work of each micro-batch.
    Returns int64 [n], the micro-batch of each sequence. It stops at the first part that fits nowhere and leaves -1.
    """
    count = len(levels)
    room = _Room(levels.copy(), np.full(count, max_tokens), np.full(count, max_sequences))
    micro_batch_of = np.full(len(groups.own), -1)
    is_open = np.arange(count)
    least = groups.shared.min() + groups.own.min()
    for group in order:
        left = np.arange(groups.start[group], groups.start[group + 1])
        tried = np.zeros(count if len(left) > 1 else 0, np.bool_)
        while len(left) > 0:
            whole, place = _place(groups, group, left, room, is_open, tried, max_sequences)
            if place < 0:
                return micro_batch_of
            taken = left
            if not whole:
                tried[place] = True
                load, tokens = room.load[place] - groups.shared[group], room.tokens[place] - groups.shared_tokens[group]
                taken = _cut(groups, left, load, tokens, room.sequences[place])
            if len(taken) > 0:
                micro_batch_of[taken] = place
                left = left[micro_batch_of[left] < 0]
                room.load[place] -= groups.shared[group] + groups.own[taken].sum()
                room.tokens[place] -= groups.shared_tokens[group] + groups.own_tokens[taken].sum()
                room.sequences[place] -= len(taken)
                if room.load[place] < least or room.sequences[place] == 0:
                    is_open = is_open[is_open != place]
    return micro_batch_of


@compiled
def _place(
    groups: Groups, group: int, left: Integers, room: _Room, is_open: Integers, tried: NDArray[np.bool_], untouched: int
) -> tuple[bool, int]:
    """Find the fullest micro-batch with room for all of `left`, True; else the one with most room, False; or -1.

    is_open: int64, micro-batches with room. tried: bool [M], those that take no more of this group; [0] without cuts.
    untouched: room for sequences in an empty micro-batch.
    """
    own, tokens = 0.0, 0
    for row in left:
        own += groups.own[row]
        tokens += groups.own_tokens[row]
    shared, shared_tokens, per_token = groups.shared[group], groups.shared_tokens[group], own / tokens
    least, divisible = shared + groups.own[left[-1]], len(tried) > 0
    fullest, widest, most = -1, -1, 0.0
    for place in is_open:
        load = room.load[place]
        if load < least or (divisible and tried[place]):
            continue
        free, free_tokens = load - shared, room.tokens[place] - shared_tokens
        if free >= own and free_tokens >= tokens and room.sequences[place] >= len(left):
            if fullest < 0 or load < room.load[fullest]:
                fullest = place
        elif fullest < 0 and divisible and min(free, free_tokens * per_token) > most:
            widest, most = place, min(free, free_tokens * per_token)
        if untouched == room.sequences[place]:
            break  # later ones are empty and have no more room
    return fullest >= 0, fullest if fullest >= 0 else widest


@compiled
def _cut(groups: Groups, left: Integers, load: float, tokens: int, sequences: int) -> Integers:
    """Return the sequences of `left`, from the heaviest on, that fill this room best in `STARTS` tries; or none."""
    best, heaviest, taken = left[:0], 0.0, np.empty_like(left)
    for start in range(min(len(left), STARTS)):
        weight, size, count = 0.0, 0, 0
        for row in left[start:]:
            fits = weight + groups.own[row] <= load and size + groups.own_tokens[row] <= tokens
            if fits and count < sequences:
                taken[count] = row
                weight += groups.own[row]
                size += groups.own_tokens[row]
                count += 1
        if weight > heaviest:
            best, heaviest = taken[:count].copy(), weight
    return best


class Bundles(NamedTuple):
    """Bundles that a micro-batch may give: nothing, all its sequences, or one of its several groups.

    rows: int64, its sequences by group. A bundle is `rows[first : first + members]`. group: -1 for none.
    own, own_tokens: sums over sequences. leaving, entering: work that the giver saves and its partner adds.
    """

    rows: Integers
    first: Integers
    members: Integers
    group: Integers
    own: Floats
    own_tokens: Integers
    leaving: Floats
    leaving_tokens: Integers
    entering: Floats
    entering_tokens: Integers


@compiled
def exchange_prefixes(
    groups: Groups, micro_batch_of: Integers, levels: Floats, max_tokens: int, max_sequences: int, effort: int
) -> tuple[Integers, int]:
    """Exchange until no micro-batch is above its level, nothing helps, or `effort` pairs of bundles are compared.

    Each exchange makes the heavier of two micro-batches lighter, and none heavier than the heavier one was.
    micro_batch_of: int64 [n], none empty, within the caps before and after. levels: float64 [M].
    Returns a new int64 [n], and the effort that is left.
    """
    filled = link(groups.own, groups.own_tokens.astype(np.float64), micro_batch_of, np.zeros(len(levels)))
    for place in range(len(levels)):
        _count_prefixes(groups, filled, place)
    is_open, failures = np.ones(len(levels), np.bool_), 0
    while effort > 0 and failures < FAILURES and is_open.any():
        heavy = int(np.argmax(np.where(is_open, filled.loads - levels, -np.inf)))
        if filled.loads[heavy] <= levels[heavy]:
            break
        light, given, returned, spent = _best_exchange(groups, filled, heavy, levels, max_tokens, max_sequences)
        effort -= spent
        if light < 0:
            is_open[heavy] = False
            failures += 1
            continue
        filled.group_of[given] = light
        filled.group_of[returned] = heavy
        relink(filled, heavy, light)
        _count_prefixes(groups, filled, heavy)
        _count_prefixes(groups, filled, light)
    return filled.group_of, effort


@compiled
def _count_prefixes(groups: Groups, filled: LinkedGroups, place: int) -> None:
    before, row = -1, filled.first[place]
    while row >= 0:
        group = groups.group[row]
        if group != before:
            filled.loads[place] += groups.shared[group]
            filled.tokens[place] += groups.shared_tokens[group]
        before, row = group, filled.following[row]


@compiled
def _best_exchange(
    groups: Groups, filled: LinkedGroups, heavy: int, levels: Floats, max_tokens: int, max_sequences: int
) -> tuple[int, Integers, Integers, int]:
    """Return the best exchange of `heavy`: partner (-1 for none), rows that leave, rows that return, effort.

    The best exchange minimises the higher excess over the level plus the added work, from prefixes computed again.
    """
    nothing = filled.group_of[:0]
    spent, partner, given, returned = len(levels) * PARTNERS, -1, nothing, nothing
    below, least = filled.loads[heavy] * (1 - LEAST_GAIN) - levels[heavy], np.inf
    for light in _partners(groups, filled, heavy, levels):
        give, take = _bundles(groups, filled, heavy, light), _bundles(groups, filled, light, heavy)
        spent += len(give.own) * len(take.own)
        found, i, j = _least_sum(filled, heavy, light, give, take, levels, below, least, max_tokens, max_sequences)
        if i >= 0:
            least, partner = found, light
            given = give.rows[give.first[i] : give.first[i] + give.members[i]]
            returned = take.rows[take.first[j] : take.first[j] + take.members[j]]
    return partner, given, returned, spent


@compiled
def _partners(groups: Groups, filled: LinkedGroups, heavy: int, levels: Floats) -> Integers:
    chosen = np.zeros(len(levels), np.bool_)
    row = filled.first[heavy]
    while row >= 0:
        for other in range(groups.start[groups.group[row]], groups.start[groups.group[row] + 1]):
            chosen[filled.group_of[other]] = True
        row = filled.following[row]
    excess, light = filled.loads - levels, -1
    for _ in range(min(PARTNERS, len(levels))):
        light = next_lightest(excess, light)
        chosen[light] = True
    chosen[heavy] = False
    return np.flatnonzero(chosen)


@compiled
def _bundles(groups: Groups, filled: LinkedGroups, place: int, partner: int) -> Bundles:
    rows, others = members_of(filled, place), groups.group[members_of(filled, partner)]
    of = groups.group[rows]
    first, count = np.zeros(1 + 2 * len(rows), np.int64), np.ones(1 + 2 * len(rows), np.int64)
    first[1 : len(rows) + 1] = np.arange(len(rows))
    count[0], end, start = 0, 1 + len(rows), 0
    for stop in range(1, len(rows) + 1):
        if stop == len(rows) or of[stop] != of[start]:
            if stop - start > 1:
                first[end], count[end] = start, stop - start
                end += 1
            start = stop
    group, own, own_tokens = np.full(end, -1), np.zeros(end), np.zeros(end, np.int64)
    leaving, leaving_tokens, entering, entering_tokens = own.copy(), own_tokens.copy(), own.copy(), own_tokens.copy()
    for i in range(1, end):
        members, g = rows[first[i] : first[i] + count[i]], of[first[i]]
        group[i], own[i], own_tokens[i] = g, groups.own[members].sum(), groups.own_tokens[members].sum()
        leaves, enters = (of == g).sum() == count[i], not (others == g).any()
        leaving[i] = own[i] + (groups.shared[g] if leaves else 0.0)
        leaving_tokens[i] = own_tokens[i] + (groups.shared_tokens[g] if leaves else 0)
        entering[i] = own[i] + (groups.shared[g] if enters else 0.0)
        entering_tokens[i] = own_tokens[i] + (groups.shared_tokens[g] if enters else 0)
    return Bundles(
        rows, first[:end], count[:end], group, own, own_tokens, leaving, leaving_tokens, entering, entering_tokens
    )


@compiled
def _least_sum(
    filled: LinkedGroups,
    heavy: int,
    light: int,
    give: Bundles,
    take: Bundles,
    levels: Floats,
    below: float,
    least: float,
    max_tokens: int,
    max_sequences: int,
) -> tuple[float, int, int]:
    """Return the best exchange with both excesses under `below` and a sum (`_best_exchange`) under `least`.

    Returns the sum and both bundles, -1 for none.
    """
    best_i, best_j = -1, -1
    one, other = filled.loads[heavy] - levels[heavy], filled.loads[light] - levels[light]
    room_heavy, room_light = max_tokens - filled.tokens[heavy], max_tokens - filled.tokens[light]
    for i in range(1, len(give.own)):
        for j in range(len(take.own)):
            if give.group[i] == take.group[j]:  # both keep the prefix
                less = more = give.own[i] - take.own[j]
                less_tokens = more_tokens = give.own_tokens[i] - take.own_tokens[j]
            else:
                less, more = give.leaving[i] - take.entering[j], give.entering[i] - take.leaving[j]
                less_tokens = give.leaving_tokens[i] - take.entering_tokens[j]
                more_tokens = give.entering_tokens[i] - take.leaving_tokens[j]
            higher = max(one - less, other + more)
            if higher >= below or higher + more - less >= least:
                continue
            moved = give.members[i] - take.members[j]
            counts = filled.counts[heavy] - moved, filled.counts[light] + moved
            fits = -less_tokens <= room_heavy and more_tokens <= room_light
            if fits and 1 <= counts[0] <= max_sequences >= counts[1]:
                least, best_i, best_j = higher + more - less, i, j
    return least, best_i, best_j
