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
from numpy.typing import NDArray

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
    in_tree = _InTree(sizes[rows], weights[rows], depths.tokens[rows], depths.workloads[rows], deeper)
    before: list[int] = []
    for share in LARGEST:
        starts = in_tree.divided(int(request.caps.max_tokens * share), of_a_rank * share)
        if len(starts) < len(rows) and starts != before:
            yield in_tree.joined(np.array(starts), rows, beginnings)
        before = starts


@dataclass(frozen=True, eq=False)
class _InTree:
    """Sequences in the order of their groups' trees: sizes, weights, and what each shares with the one before it.

    deeper: bool [n], whether that is more than their group's prefix.
    """

    sizes: Integers
    weights: Floats
    depths: Integers
    depth_weights: Floats
    deeper: NDArray[np.bool_]

    def divided(self, tokens: int, weight: float) -> list[int]:
        """Where branches begin, each of at most so many tokens and so much work, or of one sequence."""
        # Sums up to each sequence, of what it adds to the one before it.
        size = np.append(0, np.cumsum(self.sizes - self.depths)).tolist()
        work = np.append(0.0, np.cumsum(self.weights - self.depth_weights)).tolist()
        depths, depth_weights = self.depths.tolist(), self.depth_weights.tolist()
        parts, found = self._runs(), []
        while parts:
            first, stop = parts.pop()
            fits = size[stop] - size[first] + depths[first] <= tokens
            if stop - first == 1 or (fits and work[stop] - work[first] + depth_weights[first] <= weight):
                found.append(first)
            else:
                least = min(depths[first + 1 : stop])
                places = (place for place in range(first + 1, stop) if depths[place] == least)
                middle = min(places, key=lambda place: abs(2 * place - first - stop))
                parts += [(first, middle), (middle, stop)]
        return sorted(found)

    def _runs(self) -> list[tuple[int, int]]:
        """First and end of each run of neighbours that share more than their group's prefix, single ones included."""
        return list(pairwise([*np.flatnonzero(~self.deeper).tolist(), len(self.deeper)]))

    def joined(self, starts: Integers, rows: Integers, beginnings: Beginnings) -> Branches:
        """The branches that begin at `starts`, ascending; `rows`: the sequence at each place."""
        first = np.zeros(len(rows), np.bool_)
        first[starts] = True
        sizes = np.add.reduceat(self.sizes - np.where(first, 0, self.depths), starts)
        weights = np.add.reduceat(self.weights - np.where(first, 0.0, self.depth_weights), starts)
        order = np.lexsort((-sizes, -weights))
        number = np.empty(len(starts), np.int64)
        number[order] = np.arange(len(starts))
        of = np.empty(len(rows), np.int64)
        of[rows] = number[np.cumsum(first) - 1]
        return Branches(of, sizes[order], weights[order], beginnings.of_groups.select(rows[starts[order]]))
