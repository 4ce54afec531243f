"""What micro-batches of groups that share beginnings compute, kept up to date while sequences move between them.

n sequences, G groups, M micro-batches, as in shared_filling.py.
"""

from typing import NamedTuple

import numpy as np

from balancing.compiled import compiled
from balancing.grouping import Floats, Integers
from balancing.shared_filling import Groups


class Filled(NamedTuple):
    """micro_batch_of: int64 [n]. loads: float64 [M]. tokens, counts (sequences): int64 [M].

    first: int64 [M]; following, before: int64 [n]: the members of each micro-batch as lists that end with -1.
    """

    micro_batch_of: Integers
    loads: Floats
    tokens: Integers
    counts: Integers
    first: Integers
    following: Integers
    before: Integers


@compiled
def filled_by(groups: Groups, micro_batch_of: Integers, count: int) -> Filled:
    """The state of `count` micro-batches. micro_batch_of: int64 [n]."""
    rows = len(micro_batch_of)
    filled = Filled(
        np.full(rows, -1),
        np.zeros(count),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.full(count, -1),
        np.full(rows, -1),
        np.full(rows, -1),
    )
    for row in range(rows):
        _add(groups, filled, row, micro_batch_of[row])
    return filled


@compiled
def members_in(groups: Groups, filled: Filled, group: int, place: int) -> int:
    """The number of sequences of a group in a micro-batch."""
    found = 0
    for row in range(groups.start[group], groups.start[group + 1]):
        found += filled.micro_batch_of[row] == place
    return found


@compiled
def _count(groups: Groups, filled: Filled, row: int, place: int, sign: int) -> None:
    """Add a sequence (sign 1) to the sums of a micro-batch, or take it out (-1), while it is in none itself."""
    group = groups.group[row]
    alone = members_in(groups, filled, group, place) == 0
    filled.loads[place] += sign * (groups.own[row] + (groups.shared[group] if alone else 0.0))
    filled.tokens[place] += sign * (groups.own_tokens[row] + (groups.shared_tokens[group] if alone else 0))
    filled.counts[place] += sign


@compiled
def _add(groups: Groups, filled: Filled, row: int, place: int) -> None:
    _count(groups, filled, row, place, 1)
    head = filled.first[place]
    filled.following[row], filled.before[row], filled.first[place] = head, -1, row
    if head >= 0:
        filled.before[head] = row
    filled.micro_batch_of[row] = place


@compiled
def move(groups: Groups, filled: Filled, row: int, place: int) -> None:
    """Move a sequence to another micro-batch."""
    old, after, before = filled.micro_batch_of[row], filled.following[row], filled.before[row]
    if before >= 0:
        filled.following[before] = after
    else:
        filled.first[old] = after
    if after >= 0:
        filled.before[after] = before
    filled.micro_batch_of[row] = -1
    _count(groups, filled, row, old, -1)
    _add(groups, filled, row, place)
