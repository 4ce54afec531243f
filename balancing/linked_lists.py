"""Linked lists of sequences: groups that compiled loops change in place.

    first[group] -> sequence -> following[sequence] -> .. -> -1        in descending order of weight

Arrays of fixed length hold all groups, and exchanging members of two groups takes one pass over both lists.
"""

from typing import NamedTuple

import numpy as np

from balancing.compiled import compiled
from balancing.grouping import Floats, Integers


class LinkedGroups(NamedTuple):
    """n sequences, numbered in descending order of weight, in k groups.

    weights, sizes: float64 [n]; sizes are tokens. group_of, following: int64 [n]. first, counts: int64 [k].
    loads, tokens: float64 [k], sums of weights (plus `base`) and of sizes over each group. base: float64 [k].
    """

    weights: Floats
    sizes: Floats
    group_of: Integers
    following: Integers
    first: Integers
    counts: Integers
    loads: Floats
    tokens: Floats
    base: Floats


@compiled
def link(weights: Floats, sizes: Floats, group_of: Integers, base: Floats) -> LinkedGroups:
    """Build the lists from the group of each sequence, which is copied. base: float64 [k], loads of empty groups."""
    count = len(base)
    groups = LinkedGroups(
        weights,
        sizes,
        group_of.copy(),
        np.full(len(weights), -1),
        np.full(count, -1),
        np.zeros(count, np.int64),
        base.copy(),
        np.zeros(count),
        base,
    )
    last = np.full(count, -1)
    for sequence in range(len(weights)):
        _append(groups, sequence, group_of[sequence], last[group_of[sequence]])
        last[group_of[sequence]] = sequence
    return groups


@compiled
def members_of(groups: LinkedGroups, group: int) -> Integers:
    """The members of a group in descending order of weight; int64 [counts[group]]."""
    members = np.empty(groups.counts[group], np.int64)
    sequence = groups.first[group]
    for position in range(len(members)):
        members[position] = sequence
        sequence = groups.following[sequence]
    return members


@compiled
def relink(groups: LinkedGroups, one: int, other: int) -> None:
    """Rebuild the lists of two groups after `group_of` changed; sums are recomputed, so that no error accumulates."""
    left, right = groups.first[one], groups.first[other]
    for group in (one, other):
        groups.first[group], groups.counts[group] = -1, 0
        groups.loads[group], groups.tokens[group] = groups.base[group], 0.0
    last_one, last_other = -1, -1
    while left >= 0 or right >= 0:
        if right < 0 or (left >= 0 and left < right):
            sequence, left = left, groups.following[left]
        else:
            sequence, right = right, groups.following[right]
        if groups.group_of[sequence] == one:
            _append(groups, sequence, one, last_one)
            last_one = sequence
        else:
            _append(groups, sequence, other, last_other)
            last_other = sequence


@compiled
def next_lightest(loads: Floats, last: int) -> int:
    """The group after `last` in ascending order of (load, number); -1 after the last group. `last` = -1 starts."""
    found = -1
    for group in range(len(loads)):
        later = last < 0 or loads[group] > loads[last] or (loads[group] == loads[last] and group > last)
        if later and (found < 0 or loads[group] < loads[found]):
            found = group
    return found


@compiled
def _append(groups: LinkedGroups, sequence: int, group: int, last: int) -> None:
    """Append a sequence to a group whose last member is `last` (-1 if the group is empty)."""
    if last < 0:
        groups.first[group] = sequence
    else:
        groups.following[last] = sequence
    groups.following[sequence] = -1
    groups.counts[group] += 1
    groups.loads[group] += groups.weights[sequence]
    groups.tokens[group] += groups.sizes[sequence]
