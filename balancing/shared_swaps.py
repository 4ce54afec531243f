"""Whole groups that trade places between two micro-batches, with their beginnings, so that nothing is computed twice.

    heavy micro-batch --- all of a group that is there ---> any other one that shares no group with it
                      <-- all of a group, or nothing ------

n sequences, G groups, M micro-batches, as in shared_filling.py.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancing.compiled import compiled
from balancing.grouping import Floats, Integers
from balancing.shared_filling import Groups
from balancing.shared_loads import Filled

COST = 16
"""A micro-batch that is looked at takes as long as this many comparisons of bundles (shared_exchange.py)."""


class Swap(NamedTuple):
    """light: the micro-batch that gets group `given` and gives back `returned`, -1 for nothing. -1 for no swap.

    higher: the higher excess of both over their levels, afterwards.
    """

    higher: float
    light: int
    given: int
    returned: int


class Parts(NamedTuple):
    """What each group that is in a micro-batch computes there, beginning included; room for as many as sequences.

    group, tokens, members (sequences): int64. work: float64.
    """

    group: Integers
    work: Floats
    tokens: Integers
    members: Integers


@compiled
def best_swap(
    groups: Groups,
    filled: Filled,
    heavy: int,
    related: NDArray[np.bool_],
    levels: Floats,
    most: float,
    max_tokens: int,
    max_sequences: int,
) -> Swap:
    """The swap of `heavy` after which the higher of both excesses over the level is the least, and less than `most`.

    related: bool [M], the micro-batches that are left out, `heavy` and those that hold sequences of its groups among
    them.
    """
    best, room = Swap(most, -1, -1, -1), filled.counts.max()
    giving, taking = _parts(room), _parts(room)
    own, given = filled.loads[heavy] - levels[heavy], _count_parts(groups, filled, heavy, giving)
    for light in np.flatnonzero(~related):
        other = filled.loads[light] - levels[light]
        if other >= best.higher:
            continue
        taken = _count_parts(groups, filled, light, taking)
        for i in range(given):
            for j in range(-1, taken):
                less, tokens, members = giving.work[i], giving.tokens[i], giving.members[i]
                if j >= 0:
                    less -= taking.work[j]
                    tokens -= taking.tokens[j]
                    members -= taking.members[j]
                higher = max(own - less, other + less)
                if higher >= best.higher:
                    continue
                counts = filled.counts[heavy] - members, filled.counts[light] + members
                if (
                    filled.tokens[heavy] - tokens <= max_tokens
                    and filled.tokens[light] + tokens <= max_tokens
                    and 1 <= counts[0] <= max_sequences >= counts[1]
                ):
                    best = Swap(higher, light, giving.group[i], taking.group[j] if j >= 0 else -1)
    return best


@compiled
def _parts(room: int) -> Parts:
    return Parts(np.empty(room, np.int64), np.empty(room), np.empty(room, np.int64), np.empty(room, np.int64))


@compiled
def _count_parts(groups: Groups, filled: Filled, place: int, parts: Parts) -> int:
    """Write the groups of a micro-batch into `parts`; returns their number."""
    count, row = 0, filled.first[place]
    while row >= 0:
        group, at = groups.group[row], 0
        while at < count and parts.group[at] != group:
            at += 1
        if at == count:
            count += 1
            parts.group[at], parts.work[at] = group, groups.shared[group]
            parts.tokens[at], parts.members[at] = groups.shared_tokens[group], 0
        parts.work[at] += groups.own[row]
        parts.tokens[at] += groups.own_tokens[row]
        parts.members[at] += 1
        row = filled.following[row]
    return count
