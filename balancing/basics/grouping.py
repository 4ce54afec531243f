"""Store groups of sequences as one flat array, and the caps on a group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balancing.basics.compiled import compiled

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Caps:
    """Caps of a micro-batch. padded: rows times the longest count as tokens, instead of their sum."""

    max_tokens: int
    max_sequences: int
    padded: bool = False


@dataclass(frozen=True, eq=False)
class Grouping:
    """group_of: int64 [n], the group of each sequence, in 0..count."""

    group_of: Integers
    count: int

    @classmethod
    def of(cls, groups: Sequence[Sequence[int] | Integers], sequences: int) -> "Grouping":
        """Build from index lists that together contain each of 0..sequences once."""
        group_of = np.empty(sequences, np.int64)
        for number, group in enumerate(groups):
            group_of[group] = number
        return cls(group_of, len(groups))

    def sums(self, values: Floats | Integers) -> Floats:
        """Sum `values` [n] over each group: float64 [count], 0 for an empty group."""
        return np.bincount(self.group_of, values, self.count).astype(np.float64, copy=False)

    def heaviest(self, weights: Floats) -> Floats:
        """Return for each sequence the largest of `weights` [n] (>= 0) in its group."""
        largest = np.zeros(self.count)
        np.maximum.at(largest, self.group_of, weights)
        return largest[self.group_of]

    def sizes(self) -> Integers:
        return np.bincount(self.group_of, minlength=self.count)

    def members(self) -> list[Integers]:
        """Return `count` int64 arrays with ascending indices."""
        narrow = self.group_of.astype(np.int16) if self.count < 2**15 else self.group_of
        order = np.argsort(narrow, kind="stable")  # NumPy sorts 16 bits in linear time
        return np.split(order, np.cumsum(self.sizes())[:-1])

    def renumbered(self, numbers: Integers, count: int) -> "Grouping":
        """Rename group g to `numbers[g]`, in 0..count."""
        return Grouping(numbers[self.group_of], count)


@compiled
def listed(group_of: Integers, count: int) -> tuple[Integers, Integers]:
    """Return indices by group, ascending, int64 [n], and where each group begins and the last ends, [count +
    1].
    """
    bounds = np.zeros(count + 1, np.int64)
    for group in group_of:
        bounds[group + 1] += 1
    bounds = np.cumsum(bounds)
    order = np.empty(len(group_of), np.int64)
    next_place = bounds[:-1].copy()
    for index in range(len(group_of)):
        group = group_of[index]
        order[next_place[group]] = index
        next_place[group] += 1
    return order, bounds
