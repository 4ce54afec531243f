"""Neighbours in a tree that a plan keeps together, so that a micro-batch computes once what they share.

    group, in the order of its tree   a b c d | e f | g      depths 3 9 8 9 | 3 9 | 3, prefix 3, limit 4 sequences' work
    branches                          [a b c d] [e f] [g]    to a schedule each is one sequence of the group

A branch has the tokens and the workload that its sequences have together; what branches of a group share is the prefix.
Where a branch would be too heavy to balance with, it is divided where its sequences share least.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from balancing.beginnings import Beginnings
from balancing.dealing import Request, Schedule
from balancing.grouping import Floats, Grouping, Integers

LARGEST = (1.0, 0.5)
"""A branch has at most such a share of a rank's workload and of the cap on tokens: smaller ones share less than they
fill micro-batches better."""


@dataclass(frozen=True, eq=False)
class Branches:
    """of: int64 [n], the branch of each sequence, 0, 1, ..., and for each branch its size and weight, and beginnings.

    Branches are in descending order of weight, then of size.
    """

    of: Integers
    sizes: Integers
    weights: Floats
    beginnings: Beginnings

    def of_sequences(self, schedule: Schedule) -> Schedule:
        """The schedule of sequences, from one of branches."""
        return replace(schedule, grouping=Grouping(schedule.grouping.group_of[self.of], schedule.grouping.count))


def branches(
    sizes: Integers, weights: Floats, beginnings: Beginnings, request: Request, of_a_rank: float
) -> Iterator[Branches]:
    """Branches of sequences, first large ones; nothing where no two share more than their group's prefix.

    sizes: int64 [n], tokens. weights: float64 [n], each of a sequence alone. of_a_rank: the least work of a rank. A cap
    on sequences would count a branch as one, so that with a cap below n there are none.
    """
    depths = beginnings.depths
    if depths is None or request.caps.max_sequences < len(sizes):
        return
    rows = beginnings.in_order()
    deeper = depths.tokens[rows] > beginnings.tokens[rows]
    if not deeper.any():
        return
    in_tree = _InTree(sizes[rows], weights[rows], depths.tokens[rows], depths.workloads[rows])
    before: list[int] = []
    for share in LARGEST:
        limits = int(request.caps.max_tokens * share), of_a_rank * share
        starts = sorted(start for run in _runs(deeper) for start in in_tree.divided(*run, *limits))
        if len(starts) < len(rows) and starts != before:
            yield in_tree.joined(np.array(starts), rows, beginnings)
        before = starts


def _runs(deeper: np.ndarray) -> list[tuple[int, int]]:
    """First and end of each run of neighbours that share more than their group's prefix, single ones included."""
    first = np.flatnonzero(~deeper).tolist()
    return list(pairwise([*first, len(deeper)]))


@dataclass(frozen=True, eq=False)
class _InTree:
    """Sequences in the order of their groups' trees: sizes, weights, and what each shares with the one before it."""

    sizes: Integers
    weights: Floats
    depths: Integers
    depth_weights: Floats

    def divided(self, first: int, stop: int, tokens: int, weight: float) -> list[int]:
        """Where the branches of neighbours `first` to `stop` begin, each of at most so many tokens and so much work."""
        parts, found = [(first, stop)], []
        while parts:
            first, stop = parts.pop()
            if stop - first == 1 or (self._size(first, stop) <= tokens and self._weight(first, stop) <= weight):
                found.append(first)
            else:
                depths = self.depths[first + 1 : stop]
                least = first + 1 + np.flatnonzero(depths == depths.min())
                middle = int(least[np.argmin(np.abs(2 * least - first - stop))])
                parts += [(first, middle), (middle, stop)]
        return found

    def joined(self, starts: Integers, rows: Integers, beginnings: Beginnings) -> Branches:
        """The branches that begin at `starts`, ascending; `rows`: the sequence at each place."""
        ends = np.append(starts[1:], len(rows))
        sizes = np.array([self._size(*each) for each in zip(starts, ends, strict=True)])
        weights = np.array([self._weight(*each) for each in zip(starts, ends, strict=True)])
        order = np.lexsort((-sizes, -weights))
        number = np.empty(len(starts), np.int64)
        number[order] = np.arange(len(starts))
        of = np.empty(len(rows), np.int64)
        of[rows] = number[np.repeat(np.arange(len(starts)), ends - starts)]
        return Branches(of, sizes[order], weights[order], beginnings.of_groups.select(rows[starts[order]]))

    def _size(self, first: int, stop: int) -> int:
        return int(self.sizes[first:stop].sum() - self.depths[first + 1 : stop].sum())

    def _weight(self, first: int, stop: int) -> float:
        return float(self.weights[first:stop].sum() - self.depth_weights[first + 1 : stop].sum())
