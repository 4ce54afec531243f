"""What sequences begin with alike: the prefix of their group, and what neighbours in a group share beyond it.

    p p p a b c | p p p a b d | p p p a x | p p p y z      a group with a prefix of 3 tokens, in the order of its tree
    0             5             4           3              depths: tokens shared with the neighbour before

Sequences in the order of a tree's leaves and the depths between neighbours are the tree: two of them share the least
depth between them (Kasai et al. 2001, "Linear-Time Longest-Common-Prefix Computation in Suffix Arrays").
"""

from dataclasses import dataclass, replace

import numpy as np

from balancing.grouping import Floats, Integers


@dataclass(frozen=True, eq=False)
class Depths:
    """What sequences share with the one before them in their group: int64 [n] tokens, and their workload, float64 [n].

    order: int64 [n], ascending in the order of a group's tree.
    """

    order: Integers
    tokens: Integers
    workloads: Floats


@dataclass(frozen=True, eq=False)
class Beginnings:
    """group: int64 [n]; sequences of one group begin with the same tokens. tokens: int64 [n], how many, equal within a
    group. workloads: float64 [n], those of the beginnings alone. depths: None where nothing is known beyond these."""

    group: Integers
    tokens: Integers
    workloads: Floats
    depths: Depths | None = None

    @classmethod
    def of(cls, groups: Integers, tokens: Integers, workloads: Floats, depths: Depths | None = None) -> "Beginnings":
        """Those of sequences; without a beginning, 0 tokens, a sequence is a group of its own."""
        alone = np.flatnonzero(tokens == 0)
        numbers = groups.copy()
        numbers[alone] = groups.max() + 1 + np.arange(len(alone))
        return cls(np.unique(numbers, return_inverse=True)[1], tokens, workloads, depths)

    @property
    def of_groups(self) -> "Beginnings":
        """Without `depths`."""
        return replace(self, depths=None)

    def select(self, rows: Integers) -> "Beginnings":
        """Those of the sequences `rows`, with groups numbered anew."""
        numbers = np.unique(self.group[rows], return_inverse=True)[1]
        found = Beginnings(numbers, self.tokens[rows], self.workloads[rows])
        if self.depths is None:
            return found
        chosen = np.zeros(len(self.group), np.int64)
        chosen[rows] = 1
        tokens, workloads = self._shared(chosen)
        # The first of a group has none before it; the prefix stands for it.
        deep = np.maximum(found.tokens, tokens[rows]), np.maximum(found.workloads, workloads[rows])
        return replace(found, depths=Depths(self.depths.order[rows], *deep))

    def shared_tokens(self, micro_batch: Integers) -> Integers:
        """int64 [n]: tokens that another sequence of the micro-batch computes.

        All but the first of a group share their beginning, or what they begin with like the one before them.
        micro_batch: int64 [n], that of each sequence.
        """
        return self._shared(micro_batch)[0]

    def computed(self, weights: Floats, micro_batch: Integers) -> Floats:
        """float64 [n]: `weights` of sequences alone, less what another one of the micro-batch computes.

        micro_batch: int64 [n], that of each sequence.
        """
        return weights - self._shared(micro_batch)[1]

    def in_order(self, micro_batch: Integers | None = None) -> Integers:
        """int64 [n]: the sequences by group, then by micro-batch, then in the order of the group's tree.

        micro_batch: int64 [n]; None is one of all.
        """
        order = np.arange(len(self.group)) if self.depths is None else self.depths.order
        keys = (order, self.group) if micro_batch is None else (order, micro_batch, self.group)
        rows: Integers = np.lexsort(keys)
        return rows

    def _shared(self, micro_batch: Integers) -> tuple[Integers, Floats]:
        """Tokens that another sequence of the micro-batch computes, int64 [n], and their workload, float64 [n]."""
        rows = self.in_order(micro_batch)
        again = np.zeros(len(rows), np.bool_)  # not the first of its group in its micro-batch
        again[rows[1:]] = (np.diff(self.group[rows]) == 0) & (np.diff(micro_batch[rows]) == 0)
        tokens, workloads = (self.tokens, self.workloads) if self.depths is None else self._least_depths(rows)
        return np.where(again, tokens, 0), np.where(again, workloads, 0.0)

    def _least_depths(self, rows: Integers) -> tuple[Integers, Floats]:
        """What each sequence shares with the one before it in `rows`, all sequences in an order of `in_order`; of no
        meaning where that is of another group or micro-batch."""
        assert self.depths is not None
        neighbours = self.in_order()
        place = np.empty(len(rows), np.int64)
        place[neighbours] = np.arange(len(rows))
        # From the neighbour after the one before, to the sequence itself; the pieces between these are not wanted.
        ends = np.stack([np.append(0, place[rows[:-1]] + 1), place[rows] + 1], axis=1).ravel()
        tokens, workloads = np.empty(len(rows), np.int64), np.empty(len(rows))
        for found, values in ((tokens, self.depths.tokens), (workloads, self.depths.workloads)):
            padded = np.append(values[neighbours], values.dtype.type(0))
            found[rows] = np.minimum.reduceat(padded, ends)[::2]
        return tokens, workloads
