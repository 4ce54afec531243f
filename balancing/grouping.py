"""Which group each sequence is in, as one flat array: what packing and scheduling compute with."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Grouping:
    """group_of: int64 [n], the group of each sequence, in 0..count."""

    group_of: Integers
    count: int

    @classmethod
    def of(cls, groups: Sequence[Sequence[int] | Integers], sequences: int) -> "Grouping":
        """From index lists that together hold each of 0..sequences once."""
        group_of = np.empty(sequences, np.int64)
        for number, group in enumerate(groups):
            group_of[group] = number
        return cls(group_of, len(groups))

    def sums(self, values: Floats | Integers) -> Floats:
        """float64 [count]: `values` (one for each sequence) summed over each group, 0 where it is empty."""
        return np.bincount(self.group_of, values, self.count).astype(np.float64, copy=False)

    def heaviest(self, weights: Floats) -> Floats:
        """float64 [n]: for each sequence the largest of `weights` (all >= 0) in its group."""
        largest = np.zeros(self.count)
        np.maximum.at(largest, self.group_of, weights)
        return largest[self.group_of]

    def sizes(self) -> Integers:
        """int64 [count]: sequences in each group."""
        return np.bincount(self.group_of, minlength=self.count)

    def members(self) -> list[Integers]:
        """`count` int64 arrays, indices ascending in each."""
        order = np.argsort(self.group_of, kind="stable")
        return np.split(order, np.cumsum(self.sizes())[:-1])

    def renumbered(self, numbers: Integers, count: int) -> "Grouping":
        """The same groups, group g now `numbers[g]` of `count`."""
        return Grouping(numbers[self.group_of], count)
