"""Karmarkar-Karp over groups: whole ones, or equal parts of those that are heavier than a micro-batch may be.

groups --pieces--> one item each, its beginning counted once --largest differencing, refined (dealing.py)--> Schedule
"""

from dataclasses import replace

import numpy as np

from balancing.dealing import Request, Schedule, deal
from balancing.errors import CountError
from balancing.grouping import Floats, Grouping, Integers
from balancing.packing import Caps
from balancing.shared_bounds import fewest_parts, work_of_groups
from balancing.shared_filling import Groups


def deal_groups(groups: Groups, request: Request, level: float) -> Schedule | None:
    """A schedule of the sequences, refined from Karmarkar-Karp over pieces of groups; None if pieces are too few.

    level: work that a micro-batch may have before its groups are cut.
    """
    pieces = _pieces(groups, request.caps, level)
    first = np.unique(pieces, return_index=True)[1]
    shared, shared_tokens = groups.shared[groups.group[first]], groups.shared_tokens[groups.group[first]]
    weights: Floats = np.bincount(pieces, groups.own) + shared
    sizes = (np.bincount(pieces, groups.own_tokens) + shared_tokens).astype(np.int64)
    order = np.lexsort((-sizes, -weights))
    try:
        found = deal(sizes[order], weights[order], request)
    except CountError:
        return None
    group_of = np.empty_like(found.grouping.group_of)
    group_of[order] = found.grouping.group_of
    return replace(found, grouping=Grouping(group_of[pieces], found.grouping.count))


def _pieces(groups: Groups, caps: Caps, level: float) -> Integers:
    """int64 [n], the piece of each sequence; none is above the cap on tokens.

    A piece counts as one sequence under the cap on sequences, so that there every sequence is a piece.
    """
    members = np.diff(groups.start)
    if caps.max_sequences < len(groups.own):
        return np.arange(len(groups.own))
    own, room = work_of_groups(groups), level - groups.shared
    needed = np.where(room > 0, own / np.maximum(room, 1e-9 * level), np.inf)
    wanted = np.maximum(np.ceil(np.minimum(needed, members)).astype(np.int64), fewest_parts(groups, caps))
    while True:
        wanted = np.clip(wanted, 1, members)
        pieces = _equal_parts(groups, wanted)
        tokens = np.bincount(pieces, groups.own_tokens) + np.repeat(groups.shared_tokens, wanted)
        over = np.unique(np.repeat(np.arange(len(members)), wanted)[tokens > caps.max_tokens])
        if not len(over):
            return pieces
        wanted[over] *= 2


def _equal_parts(groups: Groups, counts: Integers) -> Integers:
    """int64 [n], the part of each sequence, those of the first group first; counts: int64 [G], parts of each group."""
    place = np.arange(len(groups.own)) - groups.start[groups.group]
    parts: Integers = (np.cumsum(counts) - counts)[groups.group] + place % counts[groups.group]
    return parts
