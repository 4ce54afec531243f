"""Sequences that begin with the same tokens: each micro-batch computes these tokens once.

    groups of a mini-batch --whole, or divided where that is faster--> schedules (shared_search.py) --> the fastest

A whole group computes its beginning once. A part of a group computes it again, but parts fill micro-batches better and
fit under the cap. Parts that meet in one micro-batch share the beginning after all.

    workload of a group of lengths L_i, the first P tokens shared:    W(P) + sum_i (W(L_i) - W(P)),  W(L) = a L + b L^2
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancing.dealing import Request, Schedule
from balancing.grouping import Floats, Grouping, Integers
from balancing.schedule import arranged, schedule_evenly
from balancing.shared_filling import Groups
from balancing.shared_search import fastest_of_groups

MOST_OWN = 16
"""A beginning is worth sharing by a sequence of up to this many times as many tokens of its own: merging its attention
costs about as much as 1 / MOST_OWN of these."""


def fewest_worth_sharing(own: Any) -> Any:
    """The fewest shared tokens that pay for a sequence, or an array of them, with `own` tokens after them."""
    return -(-own // MOST_OWN)


@dataclass(frozen=True, eq=False)
class Beginnings:
    """group: int64 [n]; sequences of one group begin with the same tokens. tokens: int64 [n], how many, equal within a
    group. workloads: float64 [n], those of the beginnings alone."""

    group: Integers
    tokens: Integers
    workloads: Floats

    @classmethod
    def of(cls, groups: Integers, tokens: Integers, workloads: Floats) -> "Beginnings":
        """Those of sequences; without a beginning, 0 tokens, a sequence is a group of its own."""
        alone = np.flatnonzero(tokens == 0)
        numbers = groups.copy()
        numbers[alone] = groups.max() + 1 + np.arange(len(alone))
        return cls(np.unique(numbers, return_inverse=True)[1], tokens, workloads)

    def select(self, rows: Integers) -> "Beginnings":
        """Those of the sequences `rows`, with groups numbered anew."""
        numbers = np.unique(self.group[rows], return_inverse=True)[1]
        return Beginnings(numbers, self.tokens[rows], self.workloads[rows])

    def shared_tokens(self, micro_batch: Integers) -> Integers:
        """int64 [n]: tokens that another sequence of the micro-batch computes, all but the first of a group.

        micro_batch: int64 [n], that of each sequence.
        """
        return np.where(self._again(micro_batch), self.tokens, 0)

    def computed(self, weights: Floats, micro_batch: Integers) -> Floats:
        """float64 [n]: `weights` of sequences alone, less the beginnings that another one of the micro-batch computes.

        micro_batch: int64 [n], that of each sequence.
        """
        return np.where(self._again(micro_batch), weights - self.workloads, weights)

    def _again(self, micro_batch: Integers) -> NDArray[np.bool_]:
        again = np.ones(len(self.group), np.bool_)
        again[np.unique(micro_batch * (self.group.max() + 1) + self.group, return_index=True)[1]] = False
        return again


def schedule_shared(sizes: Integers, weights: Floats, beginnings: Beginnings, request: Request) -> Schedule:
    """The fastest schedule found of groups, divided where that is faster; raises as `schedule_evenly` does.

    sizes: int64 [n], tokens. weights: float64 [n], each of a sequence alone, descending.
    """
    groups, rows = in_groups(sizes, weights, beginnings)
    found = fastest_of_groups(groups, request)
    best, computed = None, weights
    if found is not None:
        best = replace(found, grouping=Grouping(_in_rows(found.grouping.group_of, rows), found.grouping.count))
        computed = beginnings.computed(weights, best.grouping.group_of)
    if best is None or float(weights.sum()) / request.ranks < best.time(computed):
        alone = schedule_evenly(sizes, weights, request)  # as if nothing were shared
        shared = beginnings.computed(weights, alone.grouping.group_of)
        if best is None or alone.time(shared) < best.time(computed):
            best, computed = alone, shared
    return arranged(best, computed, request.order)


def in_groups(sizes: Integers, weights: Floats, beginnings: Beginnings) -> tuple[Groups, Integers]:
    """The sequences in order of group, each group from the heaviest on, and this order, int64 [n].

    sizes: int64 [n], tokens. weights: float64 [n], each of a sequence alone.
    """
    own = weights - beginnings.workloads
    rows = np.lexsort((-own, beginnings.group))
    group = beginnings.group[rows]
    start = np.flatnonzero(np.diff(group, prepend=-1))
    first, ends = rows[start], np.append(start, len(rows))
    own_tokens = (sizes - beginnings.tokens)[rows]
    return Groups(own[rows], own_tokens, group, ends, beginnings.workloads[first], beginnings.tokens[first]), rows


def _in_rows(values: Integers, rows: Integers) -> Integers:
    """int64 [n]: `values`, one for each of `rows`, in the order of rows 0..n."""
    result = np.empty_like(values)
    result[rows] = values
    return result
