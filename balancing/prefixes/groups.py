"""Describe the tokens that sequences share at their start: a group's prefix, and longer ones between
neighbours.

    p p p a b c | p p p a b d | p p p a x | p p p y z   a group with a prefix of 3, in the order of its tree
    0             5             4           3           depths: tokens shared with the neighbour before

The order of a tree's leaves and the depths between neighbours define the tree: two sequences share the least
depth between them (Kasai et al. 2001, "Linear-Time Longest-Common-Prefix Computation in Suffix Arrays").

`subtrees` keeps neighbours together. A subtree is planned as one sequence, cut where its sequences share
least:

    depths 3 9 8 9 | 3 9 | 3     prefix 3, a subtree holds 4 sequences' work     [a b c d] [e f] [g]
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from balancing.basics.grouping import Floats, Integers
from balancing.basics.validation import group_names
from balancing.errors import LengthError, OptionError

MOST_OWN = 16
"""Sharing pays for a sequence with up to this many times as many own tokens: merging attention costs about 1
/ MOST_OWN of them.
"""
LARGEST = (1.0, 0.5)
"""Most work and tokens of a subtree, shares of a rank's work and the cap. Larger ones share more, smaller
ones fit.
"""


def fewest_worth_sharing(own_tokens: Any) -> Any:
    """Return the fewest shared tokens that pay for a sequence with `own_tokens` further tokens, also for
    arrays.
    """
    return -(-own_tokens // MOST_OWN)


class Groups(NamedTuple):
    """The n sequences of a mini-batch by group, each of the G groups from its heaviest on.

    own, own_tokens: float64 and int64 [n], each sequence's work and tokens after the prefix.
    group: int64 [n], ascending. start: int64 [G + 1]. Group g is `start[g]..start[g + 1]`.
    shared, shared_tokens: float64 and int64 [G], work and tokens of the prefixes.
    """

    own: Floats
    own_tokens: Integers
    group: Integers
    start: Integers
    shared: Floats
    shared_tokens: Integers


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Tokens, int64 [n], and work, float64 [n], that each sequence shares with the one before it in its
    group.

    order: int64 [n], ascending in the order of a group's tree.
    """

    order: Integers
    tokens: Integers
    workloads: Floats


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Prefixes by group. group: int64 [n]. tokens: int64 [n], the prefix length, equal within a group.

    workloads: float64 [n], work of the prefix alone. tree: None if nothing is known beyond the prefixes.
    """

    group: Integers
    tokens: Integers
    workloads: Floats
    tree: PrefixTree | None = None

    @classmethod
    def of(
        cls,
        groups: Integers,
        tokens: Integers,
        workloads: Floats,
        tree: PrefixTree | None = None,
    ) -> "SharedPrefixes":
        """Number the groups. A sequence with a prefix of 0 tokens is a group of one."""
        alone = np.flatnonzero(tokens == 0)
        numbers = groups.copy()
        numbers[alone] = groups.max() + 1 + np.arange(len(alone))
        return cls(np.unique(numbers, return_inverse=True)[1], tokens, workloads, tree)

    def select(self, rows: Integers) -> "SharedPrefixes":
        """Return the sequences `rows`, with groups renumbered."""
        numbers = np.unique(self.group[rows], return_inverse=True)[1]
        prefixes = SharedPrefixes(numbers, self.tokens[rows], self.workloads[rows])
        if self.tree is None:
            return prefixes
        chosen = np.zeros(len(self.group), np.int64)
        chosen[rows] = 1
        tokens, workloads = self._shared(chosen)
        # The first of a group has no neighbour before it, so the prefix replaces the depth.
        deep = (
            np.maximum(prefixes.tokens, tokens[rows]),
            np.maximum(prefixes.workloads, workloads[rows]),
        )
        return replace(prefixes, tree=PrefixTree(self.tree.order[rows], *deep))

    def measured(self, measure: Callable[[Integers], Any]) -> "SharedPrefixes":
        """Replace tokens by a measure of each sequence's first tokens. measure: never falls with their
        number.
        """
        tree = self.tree and replace(self.tree, tokens=measure(self.tree.tokens))
        return replace(self, tokens=measure(self.tokens), tree=tree)

    def costing(self, workload: Callable[[Integers], Floats]) -> "SharedPrefixes":
        """Replace the work of shared tokens. workload: of each sequence's first tokens."""
        tree = self.tree and replace(self.tree, workloads=workload(self.tree.tokens))
        return replace(self, workloads=workload(self.tokens), tree=tree)

    def shared_tokens(self, micro_batch: Integers) -> Integers:
        """Return the tokens that another sequence of the micro-batch computes. micro_batch: int64 [n]."""
        return self._shared(micro_batch)[0]

    def computed(self, weights: Floats, micro_batch: Integers) -> Floats:
        """Subtract from `weights` of sequences alone the share that another sequence of the micro-batch
        computes.
        """
        return weights - self._shared(micro_batch)[1]

    def in_order(self, micro_batch: Integers | None = None) -> Integers:
        """Return the sequences by group, then micro-batch, then tree order, int64 [n]."""
        order = np.arange(len(self.group)) if self.tree is None else self.tree.order
        keys = (
            (order, self.group) if micro_batch is None else (order, micro_batch, self.group)
        )
        rows: Integers = np.lexsort(keys)
        return rows

    def in_groups(self, sizes: Integers, weights: Floats) -> tuple[Groups, Integers]:
        """Return the sequences by group, and their order, int64 [n].

        With a tree, a sequence counts only the tokens not shared with its neighbour, the least that any plan
        computes.
        """
        shared = self if self.tree is None else self.tree
        own_weights = weights - shared.workloads
        rows = np.lexsort((-own_weights, self.group))
        group = self.group[rows]
        start = np.flatnonzero(np.diff(group, prepend=-1))
        first = rows[start]
        ends = np.append(start, len(rows))
        own_tokens = (sizes - shared.tokens)[rows]
        return Groups(
            own_weights[rows],
            own_tokens,
            group,
            ends,
            self.workloads[first],
            self.tokens[first],
        ), rows

    def _shared(self, micro_batch: Integers) -> tuple[Integers, Floats]:
        rows = self.in_order(micro_batch)
        # Not the first of its group in its micro-batch.
        again = np.zeros(len(rows), np.bool_)
        again[rows[1:]] = (np.diff(self.group[rows]) == 0) & (
            np.diff(micro_batch[rows]) == 0
        )
        tokens, workloads = (
            (self.tokens, self.workloads)
            if self.tree is None
            else self._least_depths(rows, self.tree)
        )
        return np.where(again, tokens, 0), np.where(again, workloads, 0.0)

    def _least_depths(self, rows: Integers, tree: PrefixTree) -> tuple[Integers, Floats]:
        """Return what each sequence shares with the one before in `rows`. Values across groups are
        meaningless.
        """
        neighbours = self.in_order()
        place = np.empty(len(rows), np.int64)
        place[neighbours] = np.arange(len(rows))
        # From the neighbour after the one before, to the sequence itself. The pieces between these are
        # dropped.
        ends = np.stack(
            [np.append(0, place[rows[:-1]] + 1), place[rows] + 1], axis=1
        ).ravel()
        tokens = np.empty(len(rows), tree.tokens.dtype)
        workloads = np.empty(len(rows))
        for depths, values in ((tokens, tree.tokens), (workloads, tree.workloads)):
            padded = np.append(values[neighbours], values.dtype.type(0))
            depths[rows] = np.minimum.reduceat(padded, ends)[::2]
        return tokens, workloads


def checked_prefixes(
    groups: ArrayLike | None,
    lengths: ArrayLike | None,
    order: ArrayLike | None,
    depths: ArrayLike | None,
    tokens: Integers,
    multiple: int,
    workload: Callable[[Integers], Floats],
) -> SharedPrefixes | None:
    """Check the arguments of `plan_batch` about prefixes. Raises as it does."""
    if (order is None) != (depths is None):
        raise OptionError("tree_order and tree_depths go together. Pass both, or neither.")
    if groups is None and lengths is None:
        if order is not None:
            raise OptionError(
                "tree_order and tree_depths need groups. Pass prefix_groups and prefix_lengths, too."
            )
        return None
    if groups is None or lengths is None:
        raise OptionError(
            "prefix_groups and prefix_lengths go together. Pass both, or neither."
        )
    names = group_names(groups, "prefix_groups", len(tokens))
    shared = _shorter(lengths, "prefix_lengths", tokens)
    largest = np.zeros(names.max() + 1, np.int64)
    np.maximum.at(largest, names, shared)
    differs = (largest[names] != shared) & (shared > 0)
    if differs.any():
        index = int(np.argmax(differs))
        raise LengthError(
            f"prefix_lengths[{index}] is {shared[index]}, but another of prefix_groups={names[index]} has "
            f"{largest[names[index]]}. A group has one."
        )
    # Only whole multiples: then padding a shared row once and padding each sequence keep the same cap.
    shared = shared - shared % multiple
    tree = None
    if order is not None and depths is not None:
        places = group_names(order, "tree_order", len(tokens))
        deeper = _shorter(depths, "tree_depths", tokens)
        deeper = np.maximum(deeper - deeper % multiple, shared)
        tree = PrefixTree(places, deeper, workload(deeper))
    return SharedPrefixes.of(names, shared, workload(shared), tree)


def _shorter(values: ArrayLike, name: str, tokens: Integers) -> Integers:
    shared = group_names(values, name, len(tokens))
    if (shared >= tokens).any():
        index = int(np.argmax(shared >= tokens))
        raise LengthError(
            f"{name}[{index}] is {shared[index]}, not below lengths[{index}]={tokens[index]}"
        )
    return shared


@dataclass(frozen=True, eq=False)
class Subtrees:
    """of: int64 [n], the subtree of each sequence. sizes, weights, prefixes: of the subtrees,
    heaviest first.
    """

    of: Integers
    sizes: Integers
    weights: Floats
    prefixes: SharedPrefixes


def subtrees(
    sizes: Integers,
    weights: Floats,
    prefixes: SharedPrefixes,
    max_tokens: int,
    of_a_rank: float,
) -> Iterator[Subtrees]:
    """Yield divisions into subtrees, large ones first, or nothing if no two sequences share more than their
    prefix.
    """
    tree = prefixes.tree
    rows = prefixes.in_order()
    if tree is None or not (tree.tokens > prefixes.tokens).any():
        return
    depths = tree.tokens[rows]
    depth_weights = tree.workloads[rows]
    # Sums over the tokens that each sequence adds to the one before it.
    size = np.append(0, np.cumsum(sizes[rows] - depths)).tolist()
    work = np.append(0.0, np.cumsum(weights[rows] - depth_weights)).tolist()
    runs = [*np.flatnonzero(depths <= prefixes.tokens[rows]).tolist(), len(rows)]
    old_starts: list[int] = []
    for share in LARGEST:
        tokens = int(max_tokens * share)
        weight = of_a_rank * share
        parts = list(pairwise(runs))
        starts = list[int]()
        shared = depths.tolist()
        while parts:
            first, stop = parts.pop()
            fits = size[stop] - size[first] + shared[first] <= tokens
            if stop - first == 1 or (
                fits and work[stop] - work[first] + float(depth_weights[first]) <= weight
            ):
                starts.append(first)
                continue
            least = min(shared[first + 1 : stop])
            places = (place for place in range(first + 1, stop) if shared[place] == least)
            middle = min(places, key=lambda place: abs(2 * place - first - stop))
            parts += [(first, middle), (middle, stop)]
        starts.sort()
        if len(starts) < len(rows) and starts != old_starts:
            yield _joined(np.array(starts), rows, sizes, weights, prefixes, tree)
        old_starts = starts


def _joined(
    starts: Integers,
    rows: Integers,
    sizes: Integers,
    weights: Floats,
    prefixes: SharedPrefixes,
    tree: PrefixTree,
) -> Subtrees:
    first = np.zeros(len(rows), np.bool_)
    first[starts] = True
    tokens = np.add.reduceat(sizes[rows] - np.where(first, 0, tree.tokens[rows]), starts)
    work = np.add.reduceat(
        weights[rows] - np.where(first, 0.0, tree.workloads[rows]), starts
    )
    order = np.lexsort((-tokens, -work))
    number = np.empty(len(starts), np.int64)
    number[order] = np.arange(len(starts))
    subtree_of = np.empty(len(rows), np.int64)
    subtree_of[rows] = number[np.cumsum(first) - 1]
    heads = rows[starts[order]]
    return Subtrees(
        subtree_of, tokens[order], work[order], replace(prefixes, tree=None).select(heads)
    )
