"""Sequences that begin with the same tokens: each micro-batch computes these tokens once.

    groups of a mini-batch --whole, or divided--> pieces --dealing.py--> the fastest division --schedule.py--> schedule

A whole group computes its beginning once. A piece of a group computes it again, but pieces balance better and fit under
the cap: heavy groups are divided ever further, and the division with the least time is taken. Pieces that meet in one
micro-batch share the beginning after all.

    workload of a group of lengths L_i, the first P tokens shared:    W(P) + sum_i (W(L_i) - W(P)),  W(L) = a L + b L^2
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from balancing.dealing import Request, Schedule, deal
from balancing.errors import CountError
from balancing.grouping import Floats, Grouping, Integers
from balancing.schedule import schedule_evenly

Values = TypeVar("Values", Integers, Floats)

NEAR_THE_BOUND = 5e-3
"""Groups are not divided further if the schedule takes at most this share more than workload / ranks."""
FINER = 1.5
"""The heaviest piece of a division / that of the next."""


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
        shared = self.tokens.copy()
        _, first = np.unique(micro_batch * (self.group.max() + 1) + self.group, return_index=True)
        shared[first] = 0
        return shared


def schedule_shared(sizes: Integers, weights: Floats, beginnings: Beginnings, request: Request) -> Schedule:
    """The fastest schedule found of groups that stay together, or of their pieces; raises as `schedule_evenly` does.

    sizes: int64 [n], tokens. weights: float64 [n], each of a sequence alone, descending.
    """
    together = request.caps.max_sequences >= len(sizes)  # pieces of several sequences could exceed that cap
    best, fastest = np.arange(len(sizes)), np.inf
    for pieces in _divisions(sizes, weights, beginnings, request) if together else ():
        piece_weights = _of_pieces(pieces, weights, beginnings.workloads)
        if piece_weights.sum() / request.ranks >= fastest:
            break
        first = _scheduled(deal, pieces, sizes, weights, beginnings, request)
        time = np.inf if first is None else first.time(piece_weights)
        if time < fastest:
            best, fastest = pieces, time
        if time <= piece_weights.sum() / request.ranks * (1 + NEAR_THE_BOUND):
            break
    found = _scheduled(schedule_evenly, best, sizes, weights, beginnings, request)
    if found is None:
        return schedule_evenly(sizes, weights, request)
    return replace(found, grouping=Grouping(found.grouping.group_of[best], found.grouping.count))


def _divisions(sizes: Integers, weights: Floats, beginnings: Beginnings, request: Request) -> Iterator[Integers]:
    """int64 [n], the piece of each sequence: first whole groups, then ever smaller pieces, at last single sequences.

    Only groups that are heavier than a piece may be are divided, and into as many equal pieces as that takes.
    """
    count = int(beginnings.group.max()) + 1
    members = np.bincount(beginnings.group, minlength=count)
    first = np.unique(beginnings.group, return_index=True)[1]
    own = np.bincount(beginnings.group, weights - beginnings.workloads, count)
    shared, shared_tokens = beginnings.workloads[first], beginnings.tokens[first]
    order = np.argsort(beginnings.group, kind="stable")
    place = np.empty_like(order)  # of each sequence in its group, from the heaviest on
    place[order] = np.arange(len(order)) - np.repeat(np.cumsum(members) - members, members)
    heaviest, parts = float((own + shared).sum()) / request.ranks, np.zeros(count, np.int64)
    while True:
        # n pieces of weight shared + own / n
        needed = np.where(heaviest > shared, own / np.maximum(heaviest - shared, 1e-9 * heaviest), np.inf)
        wanted = np.clip(np.ceil(np.minimum(needed, members)), 1, members).astype(np.int64)
        while True:
            pieces = (np.cumsum(wanted) - wanted)[beginnings.group] + place % wanted[beginnings.group]
            tokens = np.bincount(pieces, sizes - beginnings.tokens) + np.repeat(shared_tokens, wanted)
            over = np.unique(np.repeat(np.arange(count), wanted)[tokens > request.caps.max_tokens])
            if not len(over):
                break
            wanted[over] = np.minimum(2 * wanted[over], members[over])
        if (wanted != parts).any():
            parts = wanted
            yield pieces
        if (wanted == members).all():
            return
        heaviest /= FINER


def _of_pieces(pieces: Integers, whole: Values, beginning: Values) -> Values:
    """The sum of each piece, its beginning counted once."""
    _, first = np.unique(pieces, return_index=True)
    sums = np.bincount(pieces, whole - beginning) + beginning[first]
    return sums.astype(whole.dtype)


def _scheduled(
    how: Callable[[Integers, Floats, Request], Schedule],
    pieces: Integers,
    sizes: Integers,
    weights: Floats,
    beginnings: Beginnings,
    request: Request,
) -> Schedule | None:
    """The schedule of the pieces, in their order; None if they are too few for the counts."""
    sizes = _of_pieces(pieces, sizes, beginnings.tokens)
    weights = _of_pieces(pieces, weights, beginnings.workloads)
    order = np.lexsort((-sizes, -weights))
    try:
        found = how(sizes[order], weights[order], request)
    except CountError:
        return None
    group_of = np.empty_like(found.grouping.group_of)
    group_of[order] = found.grouping.group_of
    return replace(found, grouping=Grouping(group_of, found.grouping.count))
