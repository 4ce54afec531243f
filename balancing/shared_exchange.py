"""Exchanges between micro-batches that each compute the beginning of a group once.

    heaviest micro-batch --- a ---> another one        a, b: a sequence, or all of a group that is there; b: or nothing
                         <-- b ---

A sequence that meets others of its group costs its own tokens only; the last one of a group takes the beginning along.
Partners are the lightest micro-batches, and those that hold sequences of the same groups; with all others, whole groups
trade places (shared_swaps.py). Each exchange makes the heavier of two micro-batches lighter, and none heavier than that
one was, so the search ends.

n sequences, G groups, M micro-batches, as in shared_filling.py.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancing.compiled import compiled
from balancing.grouping import Floats, Integers
from balancing.linked_lists import next_lightest
from balancing.shared_filling import Groups
from balancing.shared_loads import Filled, filled_by, members_in, move
from balancing.shared_swaps import COST, best_swap

PARTNERS = 6
"""A heavy micro-batch tries this many of the lightest ones."""
LEAST_GAIN = 3e-4
"""An exchange is made if it makes the heavier micro-batch lighter by this share."""
FAILURES = 64
"""The search ends after this many micro-batches that no exchange makes lighter."""


class Bundles(NamedTuple):
    """What a micro-batch may give: nothing, sequences, then groups of which it has several.

    own, own_tokens, members (sequences), group: of each bundle. row: the sequence, -1 for a group or nothing.
    leaving, leaving_tokens: by how much less it computes. entering, entering_tokens: by how much more its partner does.
    """

    own: Floats
    own_tokens: Integers
    members: Integers
    group: Integers
    row: Integers
    leaving: Floats
    leaving_tokens: Integers
    entering: Floats
    entering_tokens: Integers


@compiled
def exchange_shared(
    groups: Groups,
    micro_batch_of: Integers,
    levels: Floats,
    max_tokens: int,
    max_sequences: int,
    effort: int,
) -> tuple[Integers, int]:
    """Exchange until no micro-batch is above its level, or nothing helps, or `effort` pairs of bundles are compared.

    micro_batch_of: int64 [n], none empty, within the caps, which hold afterwards, too. levels: float64 [M].
    Returns a new int64 [n], and the effort that is left.
    """
    filled = filled_by(groups, micro_batch_of, len(levels))
    is_open, failures = np.ones(len(levels), np.bool_), 0
    while effort > 0 and failures < FAILURES:
        heavy = _furthest(filled.loads - levels, is_open)
        if heavy < 0 or filled.loads[heavy] <= levels[heavy]:
            break
        light, given, returned, spent = _best(groups, filled, heavy, levels, max_tokens, max_sequences)
        effort -= spent
        if light < 0:
            is_open[heavy] = False
            failures += 1
        for row in given:
            move(groups, filled, row, light)
        for row in returned:
            move(groups, filled, row, heavy)
    return filled.micro_batch_of, effort


@compiled
def _furthest(excess: Floats, is_open: NDArray[np.bool_]) -> int:
    """The open micro-batch with the most excess; -1 if none is open."""
    found = -1
    for place in range(len(excess)):
        if is_open[place] and (found < 0 or excess[place] > excess[found]):
            found = place
    return found


@compiled
def _best(
    groups: Groups, filled: Filled, heavy: int, levels: Floats, max_tokens: int, max_sequences: int
) -> tuple[int, Integers, Integers, int]:
    """The partner (-1 for none) of the best exchange of `heavy`, the rows that go there, those that come back; effort.

    The best has the least sum of the higher of both excesses over the level, and of the work that it adds, which is
    that of beginnings computed again.
    """
    nothing = filled.micro_batch_of[:0]
    spent, partner, given, returned = len(levels) * PARTNERS, -1, nothing, nothing
    below, least = filled.loads[heavy] * (1 - LEAST_GAIN) - levels[heavy], np.inf
    partners = _partners(groups, filled, heavy, levels)
    for light in partners:
        give, take = _bundles(groups, filled, heavy, light), _bundles(groups, filled, light, heavy)
        spent += len(give.own) * len(take.own)
        found, i, j = _least(filled, heavy, light, give, take, levels, below, least, max_tokens, max_sequences)
        if i >= 0:
            least, partner = found, light
            given, returned = _rows(groups, filled, heavy, give, i), _rows(groups, filled, light, take, j)
    related = np.zeros(len(levels), np.bool_)
    related[heavy] = True
    related[partners] = True
    swap = best_swap(groups, filled, heavy, related, levels, min(below, least), max_tokens, max_sequences)
    if swap.light >= 0:
        partner, given = swap.light, _of_group(groups, filled, heavy, swap.given)
        returned = nothing if swap.returned < 0 else _of_group(groups, filled, partner, swap.returned)
    return partner, given, returned, spent + len(levels) * COST


@compiled
def _partners(groups: Groups, filled: Filled, heavy: int, levels: Floats) -> Integers:
    """The lightest micro-batches, and those that hold sequences of the groups of `heavy`."""
    chosen = np.zeros(len(levels), np.bool_)
    row = filled.first[heavy]
    while row >= 0:
        for other in range(groups.start[groups.group[row]], groups.start[groups.group[row] + 1]):
            chosen[filled.micro_batch_of[other]] = True
        row = filled.following[row]
    excess, light = filled.loads - levels, -1
    for _ in range(min(PARTNERS, len(levels))):
        light = next_lightest(excess, light)
        chosen[light] = True
    chosen[heavy] = False
    return np.flatnonzero(chosen)


@compiled
def _bundles(groups: Groups, filled: Filled, place: int, partner: int) -> Bundles:
    """The bundles of a micro-batch, for an exchange with another one."""
    most = 1 + 2 * filled.counts[place]
    own, group, row = np.zeros(most), np.full(most, -1), np.full(most, -1)
    own_tokens, members = np.zeros(most, np.int64), np.zeros(most, np.int64)
    singles, end, member = 1, 1 + filled.counts[place], filled.first[place]
    while member >= 0:
        at = end
        for position in range(1 + filled.counts[place], end):
            if group[position] == groups.group[member]:
                at = position
        end = max(end, at + 1)
        for position in (singles, at):
            own[position] += groups.own[member]
            own_tokens[position] += groups.own_tokens[member]
            members[position] += 1
            group[position] = groups.group[member]
        row[singles] = member
        singles += 1
        member = filled.following[member]
    return _priced(groups, filled, place, partner, (own[:end], own_tokens[:end], members[:end], group[:end], row[:end]))


@compiled
def _priced(
    groups: Groups,
    filled: Filled,
    place: int,
    partner: int,
    found: tuple[Floats, Integers, Integers, Integers, Integers],
) -> Bundles:
    """The bundles with what they cost: `own, own_tokens, members, group, row` of each, nothing at 0."""
    own, own_tokens, members, group, row = found
    leaving, entering = own.copy(), own.copy()
    leaving_tokens, entering_tokens = own_tokens.copy(), own_tokens.copy()
    for i in range(1, len(own)):
        if members_in(groups, filled, group[i], place) == members[i]:
            leaving[i] += groups.shared[group[i]]
            leaving_tokens[i] += groups.shared_tokens[group[i]]
        if members_in(groups, filled, group[i], partner) == 0:
            entering[i] += groups.shared[group[i]]
            entering_tokens[i] += groups.shared_tokens[group[i]]
    return Bundles(own, own_tokens, members, group, row, leaving, leaving_tokens, entering, entering_tokens)


@compiled
def _least(
    filled: Filled,
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
    """The best exchange with both excesses under `below` and a sum, see `_best`, under `least`.

    Returns the sum and both bundles, -1 for none.
    """
    best_i, best_j = -1, -1
    one, other = filled.loads[heavy] - levels[heavy], filled.loads[light] - levels[light]
    room_heavy, room_light = max_tokens - filled.tokens[heavy], max_tokens - filled.tokens[light]
    for i in range(1, len(give.own)):
        for j in range(len(take.own)):
            if give.group[i] == take.group[j]:  # both keep the beginning
                less = more = give.own[i] - take.own[j]
            else:
                less, more = give.leaving[i] - take.entering[j], give.entering[i] - take.leaving[j]
            higher = max(one - less, other + more)
            if higher >= below or higher + more - less >= least:
                continue
            if give.group[i] == take.group[j]:
                less_tokens = more_tokens = give.own_tokens[i] - take.own_tokens[j]
            else:
                less_tokens = give.leaving_tokens[i] - take.entering_tokens[j]
                more_tokens = give.entering_tokens[i] - take.leaving_tokens[j]
            moved = give.members[i] - take.members[j]
            counts = filled.counts[heavy] - moved, filled.counts[light] + moved
            if (
                -less_tokens <= room_heavy
                and more_tokens <= room_light
                and 1 <= counts[0] <= max_sequences >= counts[1]
            ):
                least, best_i, best_j = higher + more - less, i, j
    return least, best_i, best_j


@compiled
def _rows(groups: Groups, filled: Filled, place: int, bundles: Bundles, position: int) -> Integers:
    """The sequences of a bundle."""
    if bundles.row[position] >= 0:
        return bundles.row[position : position + 1].copy()
    if bundles.group[position] < 0:
        return bundles.row[:0].copy()
    return _of_group(groups, filled, place, bundles.group[position])


@compiled
def _of_group(groups: Groups, filled: Filled, place: int, group: int) -> Integers:
    """The sequences of a group in a micro-batch."""
    start, end = groups.start[group], groups.start[group + 1]
    rows: Integers = start + np.flatnonzero(filled.micro_batch_of[start:end] == place)
    return rows
