"""Schedule sequences that share prefixes: each micro-batch computes a prefix once.

    whole groups --> Karmarkar-Karp (search/assignment.py) --> near the lower bound? done
    groups in three orders --> the lowest level up to which one fills all micro-batches          (fill_groups)
      --> sorted, dealt into micro-steps

Each part of a divided group computes its prefix again, but parts fit under the cap and even out the
micro-batches. Sequences that share more than their prefix are also planned as subtrees (groups.py).

    work of a group of lengths L_i with a prefix of P:    W(P) + sum_i (W(L_i) - W(P)),  W(L) = a L + b L^2

Filling is McNaughton's wrap-around rule (1959) with a price on every cut: a group is cut only where a
micro-batch is full. n sequences by group, each group from its heaviest on. G groups, M micro-batches.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from balancing.basics.compiled import compiled
from balancing.basics.grouping import Floats, Grouping, Integers
from balancing.errors import CountError
from balancing.prefixes.bounds import (
    fewest_parts,
    prefix_step_time_bound,
    prefix_step_times,
)
from balancing.prefixes.groups import Groups, SharedPrefixes, subtrees
from balancing.search.assignment import (
    Request,
    Schedule,
    checked_steps,
    deal,
    deal_into_steps,
)
from balancing.search.schedule import arranged, schedule_evenly

NEAR_THE_LEAST = 1e-2
"""Other subtrees are not tried within this share of computing every token once, spread evenly."""
NEAR = 3e-3
"""Whole groups are final within this share of the lower bound."""
FAR = 1e-2
"""More micro-steps than the fewest are tried if no schedule is within this share of the lower bound."""
MORE_STEPS = 2
FINE, RELATIVE = 1e-3, 0.05
"""Levels differ by this share, and by this share of their excess over the lower bound."""
STARTS = 8
"""A cut fills room from the heaviest, the second heaviest, ... sequence on: so many tries."""


def schedule_with_prefixes(
    sizes: Integers, weights: Floats, prefixes: SharedPrefixes, request: Request
) -> Schedule:
    """Return the fastest schedule found. Raises as `schedule_evenly` does.

    sizes: int64 [n], tokens. weights: float64 [n], each of a sequence alone, descending.
    """
    of_prompts = replace(prefixes, tree=None)
    least, least_of_prompts = (
        _least(weights, variant, request) for variant in (prefixes, of_prompts)
    )
    best = None
    time = np.inf
    # A cap on sequences would count a subtree as one.
    capped = request.caps.max_sequences < len(sizes)
    for subtree in (
        () if capped else subtrees(sizes, weights, prefixes, request.caps.max_tokens, least)
    ):
        if time <= max(
            _least(subtree.weights, subtree.prefixes, request), least * (1 + NEAR_THE_LEAST)
        ):
            break
        try:
            schedule = _in_groups(subtree.sizes, subtree.weights, subtree.prefixes, request)
        except CountError:
            continue
        schedule = replace(
            schedule,
            grouping=Grouping(
                schedule.grouping.group_of[subtree.of], schedule.grouping.count
            ),
        )
        if schedule.time(prefixes.computed(weights, schedule.grouping.group_of)) < time:
            best = schedule
            time = schedule.time(prefixes.computed(weights, schedule.grouping.group_of))
    # Single sequences would have to meet by chance.
    if best is not None and time <= least_of_prompts:
        return best
    alone = _in_groups(sizes, weights, of_prompts, request)
    if (
        best is None
        or alone.time(prefixes.computed(weights, alone.grouping.group_of)) < time
    ):
        return alone
    return best


def _least(weights: Floats, prefixes: SharedPrefixes, request: Request) -> float:
    return (
        float(prefixes.computed(weights, np.zeros_like(prefixes.group)).sum())
        / request.ranks
    )


def _in_groups(
    sizes: Integers, weights: Floats, prefixes: SharedPrefixes, request: Request
) -> Schedule:
    groups, rows = prefixes.in_groups(sizes, weights)
    group_schedule = _Filling(groups, request).fastest()
    if group_schedule is not None:
        group_of = np.empty_like(rows)
        group_of[rows] = group_schedule.grouping.group_of
        group_schedule = replace(
            group_schedule, grouping=Grouping(group_of, group_schedule.grouping.count)
        )
        computed = prefixes.computed(weights, group_of)
        if group_schedule.time(computed) <= float(weights.sum()) / request.ranks:
            return arranged(group_schedule, computed, request.order)
    alone = schedule_evenly(sizes, weights, request)
    schedules = [alone] if group_schedule is None else [group_schedule, alone]
    work = [
        prefixes.computed(weights, schedule.grouping.group_of) for schedule in schedules
    ]
    best = min(range(len(work)), key=lambda number: schedules[number].time(work[number]))
    return arranged(schedules[best], work[best], request.order)


class _Filling:
    def __init__(self, groups: Groups, request: Request) -> None:
        self._groups = groups
        self._request = request
        self._lowest_time = np.inf

    def fastest(self) -> Schedule | None:
        """Return the fastest schedule found, in the order of `groups`, or None if nothing fits."""
        caps = self._request.caps
        ranks = self._request.ranks
        near = NEAR
        best = self._whole_groups()
        time = np.inf if best is None else best.time(self._computed(best.grouping.group_of))
        for steps in self._steps():
            bound = prefix_step_time_bound(
                self._groups, ranks, steps, caps.max_tokens, caps.max_sequences
            ).time
            if time <= bound * (1 + near):
                break
            near = FAR
            times = prefix_step_times(
                self._groups, ranks, steps, caps.max_tokens, caps.max_sequences
            )
            forced = np.pad(times, (0, steps - len(times)))
            attempts = (
                self._lowest(order, forced, bound) for order in self._orders(bound / steps)
            )
            fillings = [filled for filled in attempts if filled is not None]
            if not fillings:
                continue
            count = steps * ranks
            filled = _spread(
                fillings[-1], steps if self._request.allow_empty else count, count
            )
            schedule = self._dealt(filled, steps)
            found_time = schedule.time(self._computed(schedule.grouping.group_of))
            if found_time < time:
                best = schedule
                time = found_time
        return best

    def _whole_groups(self) -> Schedule | None:
        groups = self._groups
        caps = self._request.caps
        work = np.add.reduceat(groups.own, groups.start[:-1]) + groups.shared
        tokens = (
            np.add.reduceat(groups.own_tokens, groups.start[:-1]) + groups.shared_tokens
        )
        if tokens.max() > caps.max_tokens or caps.max_sequences < len(groups.own):
            return None
        order = np.lexsort((-tokens, -work))
        try:
            schedule = deal(tokens[order], work[order], self._request)
        except CountError:
            return None
        group_of = np.empty(len(order), np.int64)
        group_of[order] = schedule.grouping.group_of
        return replace(
            schedule, grouping=Grouping(group_of[groups.group], schedule.grouping.count)
        )

    def _steps(self) -> Iterator[int]:
        groups = self._groups
        request = self._request
        sequences = len(self._groups.own)
        parts = fewest_parts(groups, request.caps.max_tokens, request.caps.max_sequences)
        tokens = int(groups.own_tokens.sum() + parts @ groups.shared_tokens)
        fewest = max(
            -(-tokens // request.caps.max_tokens),
            -(-sequences // request.caps.max_sequences),
        )
        lowest = -(-fewest // request.ranks)
        multiple = request.count.multiple_of
        for needed in range(lowest, lowest + (MORE_STEPS + 1) * multiple, multiple):
            try:
                yield checked_steps(needed, sequences // request.ranks, sequences, request)
            except CountError:
                return

    def _orders(self, level: float) -> list[Integers]:
        """Return int64 [G] each: by what a group leaves after filling micro-batches, by its work, by its
        longest.
        """
        groups = self._groups
        own_work, longest = (
            at.reduceat(groups.own, groups.start[:-1]) for at in (np.add, np.maximum)
        )
        room = np.maximum(level - groups.shared, 1e-9 * level)
        return [
            np.argsort(-work - groups.shared, kind="stable")
            for work in (np.fmod(own_work, room), own_work, longest)
        ]

    def _computed(self, micro_batch_of: Integers) -> Floats:
        work = self._groups.own.copy()
        keys = micro_batch_of * len(self._groups.shared) + self._groups.group
        first = np.unique(keys, return_index=True)[1]
        work[first] += self._groups.shared[self._groups.group[first]]
        return work

    def _lowest(self, order: Integers, forced: Floats, bound: float) -> Integers | None:
        """Return the micro-batches of the shortest time above `bound` that fits, if below all
        times so far.
        """
        # Enough for any micro-batch.
        work = float(self._computed(np.arange(len(self._groups.own))).sum())
        longest = (
            self._lowest_time
            if np.isfinite(self._lowest_time)
            else bound + len(forced) * work
        )
        best = self._fill(order, self._levels(forced, longest))
        if best is None:
            return None
        low = 0.0
        high = longest / bound - 1
        excess = FINE
        while excess < high and high - low > max(FINE, RELATIVE * high):
            filling = self._fill(order, self._levels(forced, bound * (1 + excess)))
            if filling is None:
                low = excess
            else:
                best = filling
                high = excess
            excess = min(2 * excess, (low + high) / 2)
        self._lowest_time = bound * (1 + high)
        return best

    def _levels(self, forced: Floats, time: float) -> Floats:
        steps = len(forced)
        longer = np.concatenate([[0.0], np.cumsum(forced)[:-1]])
        levels = (time - longer) / (steps - np.arange(steps))
        level = (
            levels[np.argmax(forced <= levels)] if (forced <= levels).any() else levels[-1]
        )
        return np.repeat(np.maximum(forced, level), self._request.ranks)

    def _fill(self, order: Integers, levels: Floats) -> Integers | None:
        caps = self._request.caps
        filled = fill_groups(
            self._groups, order, levels, caps.max_tokens, caps.max_sequences
        )
        return None if (filled < 0).any() else filled

    def _dealt(self, micro_batch_of: Integers, steps: int) -> Schedule:
        used, numbers = np.unique(micro_batch_of, return_inverse=True)
        work = self._computed(micro_batch_of)
        packed = Grouping(numbers, len(used))
        return deal_into_steps(
            packed, self._groups.own_tokens, work, self._request, steps, "shared_prefixes"
        )


def _spread(micro_batch_of: Integers, needed: int, count: int) -> Integers:
    """Fill at least `needed` of `count` micro-batches. Empty ones take a sequence from the fullest."""
    micro_batch_of, sizes = (
        micro_batch_of.copy(),
        np.bincount(micro_batch_of, minlength=count),
    )
    for empty in np.flatnonzero(sizes == 0)[: max(0, needed - np.count_nonzero(sizes))]:
        fullest = np.argmax(sizes)
        micro_batch_of[np.flatnonzero(micro_batch_of == fullest)[-1]] = empty
        sizes[fullest] -= 1
        sizes[empty] = 1
    return micro_batch_of


class _Room(NamedTuple):
    """Trees over L micro-batches: a node has the most load and tokens below it, and the leaves are the nodes
    from L.
    """

    load: Floats
    tokens: Integers
    sequences: Integers


@compiled
def fill_groups(
    groups: Groups, order: Integers, levels: Floats, max_tokens: int, max_sequences: int
) -> Integers:
    """Place whole groups in the fullest micro-batch with room. Divide a group over the emptiest if none has
    room.

    levels: float64 [M], descending, the most work of each micro-batch. Returns the micro-batch of each
    sequence, int64 [n], -1 from the first part on that fits nowhere.
    """
    count = len(levels)
    leaves = 1
    opened = 0
    place = -1
    while leaves < count:
        leaves *= 2
    room = _Room(
        np.full(2 * leaves, -np.inf),
        np.full(2 * leaves, -1),
        np.full(leaves, max_sequences),
    )
    micro_batch_of = np.full(len(groups.own), -1)
    last_cut = np.full(leaves, -1)
    least = groups.shared.min() + groups.own.min()
    fewest = groups.shared_tokens.min() + groups.own_tokens.min()
    for group in order:
        rows = np.arange(groups.start[group], groups.start[group + 1])
        divisible = len(rows) > 1
        while len(rows) > 0:
            # One empty micro-batch is open: later ones have no more room.
            if place == opened - 1 and opened < count:
                _set(room, opened, levels[opened], max_tokens)
                opened += 1
            is_whole, place = _place(groups, group, rows, room, last_cut, divisible)
            if place < 0:
                return micro_batch_of
            load = room.load[leaves + place]
            tokens = room.tokens[leaves + place]
            part = rows
            if not is_whole:
                last_cut[place] = group
                free = load - groups.shared[group]
                free_tokens = tokens - groups.shared_tokens[group]
                part = _cut(groups, rows, free, free_tokens, room.sequences[place])
            if len(part) > 0:
                micro_batch_of[part] = place
                rows = rows[micro_batch_of[rows] < 0]
                load -= groups.shared[group] + groups.own[part].sum()
                tokens -= groups.shared_tokens[group] + groups.own_tokens[part].sum()
                room.sequences[place] -= len(part)
                if load < least or tokens < fewest or room.sequences[place] == 0:  # closed
                    load = -np.inf
                    tokens = -1
                _set(room, place, load, tokens)
    return micro_batch_of


@compiled
def _set(room: _Room, place: int, load: float, tokens: int) -> None:
    node = len(room.sequences) + place
    room.load[node], room.tokens[node] = load, tokens
    while node > 1:
        node //= 2
        room.load[node] = max(room.load[2 * node], room.load[2 * node + 1])
        room.tokens[node] = max(room.tokens[2 * node], room.tokens[2 * node + 1])


@compiled
def _place(
    groups: Groups,
    group: int,
    rows: Integers,
    room: _Room,
    last_cut: Integers,
    divisible: bool,
) -> tuple[bool, int]:
    """Return (fullest micro-batch with room for all of `rows`, True), else (the one with most room, False),
    or -1.

    Of equal ones the first. last_cut: int64 [M], the last group that each was cut for, of which it takes no
    more.
    """
    work, tokens = 0.0, 0
    for row in rows:
        work += groups.own[row]
        tokens += groups.own_tokens[row]
    shared = groups.shared[group]
    shared_tokens = groups.shared_tokens[group]
    per_token = work / tokens
    least = shared + groups.own[rows[-1]]
    leaves = len(room.sequences)
    fullest = -1
    widest = -1
    lightest = np.inf
    most = 0.0
    depth = 1
    nodes = np.ones(64, np.int64)
    while depth > 0:
        depth -= 1
        node = nodes[depth]
        load = room.load[node]
        free = load - shared
        free_tokens = room.tokens[node] - shared_tokens
        fits = free >= work and free_tokens >= tokens
        wide = min(free, free_tokens * per_token)
        if load < least or not (fits or (fullest < 0 and divisible and wide >= most)):
            continue
        if node < leaves:
            # The empty one is the last.
            nodes[depth], nodes[depth + 1] = (2 * node, 2 * node + 1)
            depth += 2
            continue
        place = node - leaves
        if last_cut[place] == group:
            continue
        if fits and room.sequences[place] >= len(rows):
            if load <= lightest:  # of equal ones the first, which comes last
                fullest = place
                lightest = load
        elif divisible and wide > 0 and wide >= most:
            widest = place
            most = wide
    return fullest >= 0, fullest if fullest >= 0 else widest


@compiled
def _cut(
    groups: Groups, rows: Integers, load: float, tokens: int, sequences: int
) -> Integers:
    best = rows[:0]
    heaviest = 0.0
    part = np.empty_like(rows)
    for start in range(min(len(rows), STARTS)):
        weight, size, count = 0.0, 0, 0
        for row in rows[start:]:
            fits = (
                weight + groups.own[row] <= load and size + groups.own_tokens[row] <= tokens
            )
            if fits and count < sequences:
                part[count] = row
                weight += groups.own[row]
                size += groups.own_tokens[row]
                count += 1
        if weight > heaviest:
            best = part[:count].copy()
            heaviest = weight
    return best
