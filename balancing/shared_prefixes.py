"""Sequences that begin with the same tokens: each micro-batch computes these tokens once.

    groups of a mini-batch --whole, in halves, quarters, ... single sequences--> pieces --schedule.py--> the fastest

A whole group computes its beginning once. A piece of a group computes it again, but pieces balance better and fit under
the cap: the schedule with the least time decides. Pieces that meet in one micro-batch share the beginning after all.

    workload of a group of lengths L_i, the first P tokens shared:    W(P) + sum_i (W(L_i) - W(P)),  W(L) = a L + b L^2
"""

from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

import numpy as np

from balancing.dealing import Request, Schedule
from balancing.errors import CountError
from balancing.grouping import Floats, Grouping, Integers
from balancing.schedule import schedule_evenly

Values = TypeVar("Values", Integers, Floats)

NEAR_THE_BOUND = 5e-3
"""Groups are not divided further if the schedule takes at most this share more than workload / ranks."""


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
        """Those of the sequences `rows`."""
        return Beginnings(self.group[rows], self.tokens[rows], self.workloads[rows])

    def shared_tokens(self, micro_batch: Integers) -> Integers:
        """int64 [n]: tokens that another sequence of the micro-batch computes, all but the first of a group.

        micro_batch: int64 [n], that of each sequence.
        """
        shared = self.tokens.copy()
        _, first = np.unique(micro_batch * (self.group.max() + 1) + self.group, return_index=True)
        shared[first] = 0
        return shared


def schedule_shared(sizes: Integers, weights: Floats, beginnings: Beginnings, request: Request) -> Schedule:
    """The fastest schedule of groups that stay together, or of their pieces; raises as `schedule_evenly` does.

    sizes: int64 [n], tokens. weights: float64 [n], each of a sequence alone.
    """
    best: Schedule | None = None
    time, least = np.inf, np.inf
    together = int(np.bincount(beginnings.group).max()) if request.caps.max_sequences >= len(sizes) else 1
    while True:
        pieces = _pieces(sizes, beginnings, together, request.caps.max_tokens)
        piece_weights = _of_pieces(pieces, weights, beginnings.workloads)
        ideal = float(piece_weights.sum()) / request.ranks
        least = min(least, ideal)
        if ideal >= time:
            break
        found = _schedule(pieces, _of_pieces(pieces, sizes, beginnings.tokens), piece_weights, request, together == 1)
        if found is not None and found.time(piece_weights) < time:
            time = found.time(piece_weights)
            best = replace(found, grouping=Grouping(found.grouping.group_of[pieces], found.grouping.count))
        if together == 1 or time <= least * (1 + NEAR_THE_BOUND):
            break
        together = -(-together // 2)
    assert best is not None  # single sequences have a schedule, or raise
    return best


def _pieces(sizes: Integers, beginnings: Beginnings, together: int, max_tokens: int) -> Integers:
    """int64 [n], the piece of each sequence: at most `together` of a group, within the cap."""
    pieces = np.empty(len(sizes), np.int64)
    new = count()
    current: dict[int, list[int]] = {}  # of each group: its last piece, the sequences and the tokens in it
    own = (sizes - beginnings.tokens).tolist()
    for row, (group, tokens, added) in enumerate(
        zip(beginnings.group.tolist(), beginnings.tokens.tolist(), own, strict=True)
    ):
        piece = current.get(group)
        if piece is None or piece[1] == together or piece[2] + added > max_tokens:
            piece = current[group] = [next(new), 0, tokens]
        piece[1] += 1
        piece[2] += added
        pieces[row] = piece[0]
    return pieces


def _of_pieces(pieces: Integers, whole: Values, beginning: Values) -> Values:
    """The sum of each piece, its beginning counted once."""
    _, first = np.unique(pieces, return_index=True)
    sums = np.bincount(pieces, whole - beginning) + beginning[first]
    return sums.astype(whole.dtype)


def _schedule(pieces: Integers, sizes: Integers, weights: Floats, request: Request, required: bool) -> Schedule | None:
    """The schedule of the pieces, in their order; None if they are too few for the counts, unless it is `required`."""
    order = np.lexsort((-sizes, -weights))
    try:
        found = schedule_evenly(sizes[order], weights[order], request)
    except CountError:
        if required:
            raise
        return None
    group_of = np.empty_like(found.grouping.group_of)
    group_of[order] = found.grouping.group_of
    return replace(found, grouping=Grouping(group_of, found.grouping.count))
