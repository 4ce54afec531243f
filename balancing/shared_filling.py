"""Compiled loop that fills micro-batches with groups, whose shared beginning each micro-batch computes once.

    groups, in order --whole--> the fullest micro-batch with room
                     --divided, where none has room--> the emptiest one takes what fits, and so on with the rest

It is the wrap-around rule of McNaughton (1959) with a price on every cut: a group is cut only where a micro-batch is
full. Long beginnings are best placed first, whole; groups with short ones then fill what is left.

n sequences in order of group, each group from the heaviest on. G groups, M micro-batches.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancing.compiled import compiled
from balancing.grouping import Floats, Integers

STARTS = 8
"""A cut fills room from the heaviest sequence on, from the second on, and so on, this many times."""


class Groups(NamedTuple):
    """own, own_tokens: float64 and int64 [n], the workload and tokens of each sequence after its beginning.

    group: int64 [n], ascending. start: int64 [G + 1]; sequences of group g are `start[g]..start[g + 1]`.
    shared, shared_tokens: float64 and int64 [G], of the beginnings.
    """

    own: Floats
    own_tokens: Integers
    group: Integers
    start: Integers
    shared: Floats
    shared_tokens: Integers


class _Room(NamedTuple):
    """Room left in each micro-batch. load: float64 [M]. tokens, sequences: int64 [M]."""

    load: Floats
    tokens: Integers
    sequences: Integers


@compiled
def fill_groups(groups: Groups, order: Integers, levels: Floats, max_tokens: int, max_sequences: int) -> Integers:
    """int64 [n], the micro-batch of each sequence; it stops at the first part that fits nowhere and leaves -1.

    order: int64 [G], of the groups. levels: float64 [M], descending, the most workload of each micro-batch.
    """
    count = len(levels)
    room = _Room(levels.copy(), np.full(count, max_tokens), np.full(count, max_sequences))
    micro_batch_of = np.full(len(groups.own), -1)
    is_open = np.arange(len(room.load))
    least = groups.shared.min() + groups.own.min()
    for group in order:
        left = np.arange(groups.start[group], groups.start[group + 1])
        tried = np.zeros(len(room.load) if len(left) > 1 else 0, np.bool_)
        while len(left) > 0:
            whole, place = _place(groups, group, left, room, is_open, tried, max_sequences)
            if place < 0:
                return micro_batch_of
            taken = left
            if not whole:
                tried[place] = True
                load, tokens = room.load[place] - groups.shared[group], room.tokens[place] - groups.shared_tokens[group]
                taken = _cut(groups, left, load, tokens, room.sequences[place])
            if len(taken) > 0:
                micro_batch_of[taken] = place
                left = left[micro_batch_of[left] < 0]
                _take(groups, group, taken, room, place)
                if room.load[place] < least or room.sequences[place] == 0:
                    is_open = is_open[is_open != place]
    return micro_batch_of


@compiled
def _take(groups: Groups, group: int, taken: Integers, room: _Room, place: int) -> None:
    """Room of a micro-batch after it took sequences of a group of which it had none."""
    room.load[place] -= groups.shared[group] + groups.own[taken].sum()
    room.tokens[place] -= groups.shared_tokens[group] + groups.own_tokens[taken].sum()
    room.sequences[place] -= len(taken)


@compiled
def _place(
    groups: Groups, group: int, left: Integers, room: _Room, is_open: Integers, tried: NDArray[np.bool_], untouched: int
) -> tuple[bool, int]:
    """The fullest micro-batch with room for all of `left`, and True; else the one with most room, and False; or -1.

    is_open: int64, micro-batches with room. tried: bool [M], those that take no more of this group; [0] without cuts.
    untouched: room for sequences in a micro-batch that is empty.
    """
    own, tokens = 0.0, 0
    for row in left:
        own += groups.own[row]
        tokens += groups.own_tokens[row]
    shared, shared_tokens, per_token = groups.shared[group], groups.shared_tokens[group], own / tokens
    least, divisible = shared + groups.own[left[-1]], len(tried) > 0
    fullest, widest, most = -1, -1, 0.0
    for place in is_open:
        load = room.load[place]
        if load < least or (divisible and tried[place]):
            continue
        free, free_tokens = load - shared, room.tokens[place] - shared_tokens
        if free >= own and free_tokens >= tokens and room.sequences[place] >= len(left):
            if fullest < 0 or load < room.load[fullest]:
                fullest = place
        elif fullest < 0 and divisible and min(free, free_tokens * per_token) > most:
            widest, most = place, min(free, free_tokens * per_token)
        if untouched == room.sequences[place]:
            break  # those after it have no more room, and are empty, too
    return fullest >= 0, fullest if fullest >= 0 else widest


@compiled
def _cut(groups: Groups, left: Integers, load: float, tokens: int, sequences: int) -> Integers:
    """Sequences of `left` that fill this room best of `STARTS` tries; none if none fits. left: from the heaviest on."""
    best, heaviest, taken = left[:0], 0.0, np.empty_like(left)
    for start in range(min(len(left), STARTS)):
        weight, size, count = 0.0, 0, 0
        for row in left[start:]:
            fits = weight + groups.own[row] <= load and size + groups.own_tokens[row] <= tokens
            if fits and count < sequences:
                taken[count] = row
                weight += groups.own[row]
                size += groups.own_tokens[row]
                count += 1
        if weight > heaviest:
            best, heaviest = taken[:count].copy(), weight
    return best
