"""Groups of sequences that loops can change in place: each a list threaded through arrays, with its sums.

    first[group] -> sequence -> following[sequence] -> .. -> -1        in descending order of weight

Two arrays hold all groups whatever their counts, and two lists are merged and parted anew in one walk.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancing.compiled import compiled

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class Threaded(NamedTuple):
    """n sequences, numbered in descending order of weight, in k groups.

    weights, sizes: float64 [n]; sizes are tokens. group_of, following: int64 [n]. first, counts: int64 [k].
    loads, tokens: float64 [k], a group's sums of weights and of sizes; `loads` begin at `base`, float64 [k].
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
def thread(weights: Floats, sizes: Floats, group_of: Integers, base: Floats) -> Threaded:
    """Groups from the group of each sequence, which is copied. base: float64 [k], what groups weigh without members."""
    count = len(base)
    groups = Threaded(
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
def members_of(groups: Threaded, group: int) -> Integers:
    """The members of a group in descending order of weight; int64 [counts[group]]."""
    members = np.empty(groups.counts[group], np.int64)
    sequence = groups.first[group]
    for position in range(len(members)):
        members[position] = sequence
        sequence = groups.following[sequence]
    return members


@compiled
def rethread(groups: Threaded, one: int, other: int) -> None:
    """Thread the members of two groups anew, by `group_of`; sums are taken anew too, so that no error builds up."""
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
    """The group that follows `last` in ascending order of (load, number), -1 after the last; `last` = -1 starts."""
    found = -1
    for group in range(len(loads)):
        later = last < 0 or loads[group] > loads[last] or (loads[group] == loads[last] and group > last)
        if later and (found < 0 or loads[group] < loads[found]):
            found = group
    return found


@compiled
def _append(groups: Threaded, sequence: int, group: int, last: int) -> None:
    """Add a sequence after `last`, the last member of its group so far (-1 for none)."""
    if last < 0:
        groups.first[group] = sequence
    else:
        groups.following[last] = sequence
    groups.following[sequence] = -1
    groups.counts[group] += 1
    groups.loads[group] += groups.weights[sequence]
    groups.tokens[group] += groups.sizes[sequence]
