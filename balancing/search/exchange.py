"""Even out groups by local search: move a sequence, or exchange one or two for one or two, under caps.

    heaviest group --- a ---> lighter group        the difference `gap` of the two groups shrinks most if
                   <-- b ---                       weight(a) - weight(b) is nearest to gap / 2

a and b are bundles of up to two members, sorted by weight, so that one pass over both lists finds the best
exchange. Each exchange makes the heavier group lighter and no group heavier than the heavier one was, so the
search ends.

    first[group] -> sequence -> following[sequence] -> .. -> -1   groups are linked lists, heaviest first
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancing.basics.compiled import compiled
from balancing.basics.grouping import Caps, Floats, Grouping, Integers

Bundles = tuple[Floats, Floats, Integers, Integers]
"""Weights (descending), tokens, first and second member (-1 for none) of each bundle."""

TOLERANCE = 1e-5
"""Groups are even if they are within this share of the mean."""
MANY, TOLERANCE_OF_MANY = 32_768, 3e-3
"""More sequences are even within this share, a fifth of the error of a fitted cost model (1.4 %)."""
PARTNERS = 12
"""A heavy group tries so many of the lightest groups, or all if only the heaviest group counts."""
FAILURES = 64
"""The search ends after so many heavy groups in a row that no exchange makes lighter."""
PAIRED = 40
"""Pairs are made of at most so many members of a group, evenly spaced by weight."""
REACH = 32
"""If caps forbid the best bundle, the search examines so many on either side."""
EFFORT = 1_000_000
"""The search ends after so many groups and bundles, about 5 ms of compiled code."""
EFFORT_EACH = 200
SORTING = 8


class LinkedGroups(NamedTuple):
    """n sequences, numbered in descending order of weight, in k groups.

    weights, sizes: float64 [n], sizes in tokens. group_of, following: int64 [n]. first, counts: int64 [k].
    loads, tokens: float64 [k], sums of weights and of sizes over each group.
    """

    weights: Floats
    sizes: Floats
    group_of: Integers
    following: Integers
    first: Integers
    counts: Integers
    loads: Floats
    tokens: Floats


@compiled
def _link(weights: Floats, sizes: Floats, group_of: Integers, count: int) -> LinkedGroups:
    groups = LinkedGroups(
        weights,
        sizes,
        group_of.copy(),
        np.full(len(weights), -1),
        np.full(count, -1),
        np.zeros(count, np.int64),
        np.zeros(count),
        np.zeros(count),
    )
    last = np.full(count, -1)
    for sequence in range(len(weights)):
        _append(groups, sequence, group_of[sequence], last[group_of[sequence]])
        last[group_of[sequence]] = sequence
    return groups


@compiled
def _members_of(groups: LinkedGroups, group: int) -> Integers:
    members = np.empty(groups.counts[group], np.int64)
    sequence = groups.first[group]
    for position in range(len(members)):
        members[position] = sequence
        sequence = groups.following[sequence]
    return members


@compiled
def _relink(groups: LinkedGroups, one: int, other: int) -> None:
    """Rebuild the lists of two groups after `group_of` changed, and their sums, so that no error
    accumulates.
    """
    left = groups.first[one]
    right = groups.first[other]
    for group in (one, other):
        groups.first[group], groups.counts[group] = -1, 0
        groups.loads[group], groups.tokens[group] = 0.0, 0.0
    last_one = -1
    last_other = -1
    while left >= 0 or right >= 0:
        if right < 0 or (left >= 0 and left < right):
            sequence = left
            left = groups.following[left]
        else:
            sequence = right
            right = groups.following[right]
        if groups.group_of[sequence] == one:
            _append(groups, sequence, one, last_one)
            last_one = sequence
        else:
            _append(groups, sequence, other, last_other)
            last_other = sequence


@compiled
def _next_lightest(loads: Floats, last: int) -> int:
    """Return the group after `last` (-1: start) in ascending order of (load, number), or -1 after the last
    group.
    """
    lightest = -1
    for group in range(len(loads)):
        later = (
            last < 0
            or loads[group] > loads[last]
            or (loads[group] == loads[last] and group > last)
        )
        if later and (lightest < 0 or loads[group] < loads[lightest]):
            lightest = group
    return lightest


@compiled
def _append(groups: LinkedGroups, sequence: int, group: int, last: int) -> None:
    if last < 0:
        groups.first[group] = sequence
    else:
        groups.following[last] = sequence
    groups.following[sequence] = -1
    groups.counts[group] += 1
    groups.loads[group] += groups.weights[sequence]
    groups.tokens[group] += groups.sizes[sequence]


def tolerance_of(sequences: int) -> float:
    """Return the share of the mean within which micro-batches of so many sequences are even."""
    return TOLERANCE_OF_MANY if sequences > MANY else TOLERANCE


def even_out(
    grouping: Grouping,
    weights: Floats,
    sizes: Integers,
    caps: Caps,
    *,
    equal_size: bool = False,
    only_heaviest: bool = False,
    target: float = 0.0,
    effort: int = EFFORT,
) -> Grouping:
    """Make the heaviest groups lighter by exchanges until the groups are even or no exchange helps.

    Groups keep `caps` of the packed layout, and none that had a sequence becomes empty.
    weights: float64 [n]. sizes: int64 [n], tokens. equal_size: counts of groups differ by at most one.
    only_heaviest: stop when no exchange makes the heaviest group lighter. target: load that is light enough.
    effort: groups and bundles to examine, plus `EFFORT_EACH` for each sequence.
    """
    count = grouping.count
    order = np.argsort(-weights, kind="stable")
    descending = weights[order]
    if only_heaviest and len(weights):
        level = max(
            float(weights.sum()) / count * (1 + TOLERANCE), target, float(descending[0])
        )
    else:
        level = max(_mean_without_giants(descending, count) * (1 + TOLERANCE), target)
    evened = exchange_until_even(
        descending,
        sizes[order].astype(np.float64),
        grouping.group_of[order],
        count,
        float(caps.max_tokens),
        float(caps.max_sequences),
        equal_size,
        only_heaviest,
        level,
        effort + EFFORT_EACH * len(weights),
    )
    result = np.empty_like(evened)
    result[order] = evened
    return Grouping(result, count)


def _mean_without_giants(descending: Floats, count: int) -> float:
    """Return the mean load without giants: sequences that outweigh the mean of the remaining groups, best
    alone.
    """
    alone = descending[: count - 1]
    remaining_load = descending.sum() - np.concatenate([[0.0], np.cumsum(alone)])
    means = remaining_load / (count - np.arange(len(remaining_load)))
    return float(means[np.argmin(np.append(alone > means[:-1], False))])


@compiled
def exchange_until_even(
    weights: Floats,
    sizes: Floats,
    group_of: Integers,
    count: int,
    max_tokens: float,
    max_sequences: float,
    equal_size: bool,
    only_heaviest: bool,
    level: float,
    effort: int,
) -> Integers:
    """Search as `even_out`, for sequences in descending order of weight, and end at a load of `level`."""
    groups = _link(weights, sizes, group_of, count)
    is_open = groups.counts > 1  # any exchange of a sequence alone keeps the heavier load
    partners = count if only_heaviest else PARTNERS
    failures = 0
    for _ in range(20 * count + 200):
        heavy = _heaviest(groups.loads, is_open, only_heaviest)
        if heavy < 0 or groups.loads[heavy] <= level or effort < 0 or failures == FAILURES:
            break
        light, spent, outgoing, returned = _best_exchange(
            groups, heavy, partners, max_tokens, max_sequences, equal_size
        )
        effort -= spent
        if light < 0:
            is_open[heavy] = False
            failures += 1
            continue
        failures = 0
        for sequence in outgoing:
            if sequence >= 0:
                groups.group_of[sequence] = light
        for sequence in returned:
            if sequence >= 0:
                groups.group_of[sequence] = heavy
        _relink(groups, heavy, light)
    return groups.group_of


@compiled
def _heaviest(loads: Floats, is_open: NDArray[np.bool_], only_heaviest: bool) -> int:
    heaviest = -1
    for group in range(len(loads)):
        if (is_open[group] or only_heaviest) and (
            heaviest < 0 or loads[group] > loads[heaviest]
        ):
            heaviest = group
    return heaviest if heaviest >= 0 and is_open[heaviest] else -1


@compiled
def _best_exchange(
    groups: LinkedGroups,
    heavy: int,
    partners: int,
    max_tokens: float,
    max_sequences: float,
    equal_size: bool,
) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    """Return partner (-1: none), effort, and the sequences that go to the partner and come back."""
    spent = 0
    loads = groups.loads
    tokens = groups.tokens
    counts = groups.counts
    for largest in range(1, 3):
        give = _bundles(groups, heavy, largest)
        light = -1
        ascending = counts[:0]
        for position in range(min(partners, len(loads))):
            # Mostly the first few suffice, beyond them sorting pays.
            if position == PARTNERS:
                ascending = np.argsort(loads, kind="mergesort")
            if position < PARTNERS:
                light = _next_lightest(loads, light)
                spent += len(loads)
            else:
                light = ascending[position]
            gap = loads[heavy] - loads[light]
            if gap <= loads[heavy] * 1e-9:
                break
            take = _bundles(groups, light, largest)
            spent += len(take[1][0]) + SORTING * len(take[2][0])
            nearest = gap / 2 * (1 - 1e-9)
            best_given = (-1, -1)
            best_returned = (-1, -1)
            for given_count in range(1, largest + 1):
                for returned in range(largest + 1):
                    if max(given_count, returned) < largest or not _counts_allow(
                        counts[heavy],
                        counts[light],
                        given_count - returned,
                        max_sequences,
                        equal_size,
                    ):
                        continue
                    a = give[given_count]
                    b = take[returned]
                    spent += len(a[0]) + len(b[0])
                    nearest, i, j = _nearest(
                        a,
                        b,
                        gap / 2,
                        nearest,
                        max_tokens - tokens[heavy],
                        max_tokens - tokens[light],
                    )
                    if i >= 0:
                        best_given = (a[2][i], a[3][i])
                        best_returned = (b[2][j], b[3][j])
            if best_given[0] >= 0:
                return light, spent, best_given, best_returned
    return -1, spent, (-1, -1), (-1, -1)


@compiled
def _counts_allow(
    heavy: int, light: int, moved: int, max_sequences: float, equal_size: bool
) -> bool:
    if (
        heavy - moved < 1
        or (light > 0 and light + moved < 1)
        or max(heavy - moved, light + moved) > max_sequences
    ):
        return False
    return moved == 0 or not equal_size or moved == heavy - light


@compiled
def _nearest(
    give: Bundles,
    take: Bundles,
    half_gap: float,
    best: float,
    room_heavy: float,
    room_light: float,
) -> tuple[float, int, int]:
    """Return the least distance of a difference of weights to `half_gap`, and both positions, -1 for none."""
    best_i = -1
    best_j = -1
    start = 0
    for i in range(len(give[0])):
        wanted = give[0][i] - half_gap
        while start < len(take[0]) and take[0][start] > wanted:
            start += 1
        for step in (1, -1):
            j = start if step == 1 else start - 1
            for _ in range(REACH):
                if j < 0 or j >= len(take[0]) or abs(take[0][j] - wanted) >= best:
                    break
                growth = give[1][i] - take[1][j]
                if growth <= room_light and -growth <= room_heavy:
                    best = abs(take[0][j] - wanted)
                    best_i = i
                    best_j = j
                    break
                j += step
    return best, best_i, best_j


@compiled
def _bundles(
    groups: LinkedGroups, group: int, largest: int
) -> tuple[Bundles, Bundles, Bundles]:
    members = _members_of(groups, group)
    nothing = (np.zeros(1), np.zeros(1), np.full(1, -1), np.full(1, -1))
    singles = (
        groups.weights[members],
        groups.sizes[members],
        members,
        np.full(len(members), -1),
    )
    return nothing, singles, _pairs(groups, members) if largest == 2 else nothing


@compiled
def _pairs(groups: LinkedGroups, members: Integers) -> Bundles:
    chosen = members[:: max(1, -(-len(members) // PAIRED))].copy()
    count = len(chosen) * (len(chosen) - 1) // 2
    one = np.empty(count, np.int64)
    other = np.empty(count, np.int64)
    position = 0
    for i in range(len(chosen)):
        for j in range(i):
            one[position], other[position] = chosen[j], chosen[i]
            position += 1
    weights = groups.weights[one] + groups.weights[other]
    order = np.argsort(-weights, kind="mergesort")
    one = one[order]
    other = other[order]
    return weights[order], groups.sizes[one] + groups.sizes[other], one, other
