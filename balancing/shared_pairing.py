"""Micro-batches by pairs, so that few groups are divided: where there are about as many micro-batches as groups.

    groups --shared_annealing.py--> pairs --shared_pairs.py--> micro-batches, with room left
    scattered groups: short sequences, cheap beginnings ------> cut to fill that room (shared_filling.py)

A filling (shared_search.py) divides a group where a micro-batch is full, which is nearly every group there. Pairs
choose which groups meet, so that many are whole, and others end where a micro-batch does.
"""

import numpy as np
from numpy.typing import NDArray

from balancing.compiled import compiled
from balancing.filling import fill_lightest
from balancing.grouping import Floats, Integers
from balancing.packing import Caps
from balancing.shared_annealing import DRAWS, MOST_IN_PAIR, Pairs, anneal, pair_at
from balancing.shared_bounds import work_of_groups
from balancing.shared_dealing import equal_parts
from balancing.shared_filling import Groups, Room, cut, fill_room, take
from balancing.shared_pairs import Items, best_cut

FEWEST, MOST = 1.5, 4.0
"""Items for each pair; with fewer there is nothing to choose, and with more fillings divide few groups."""
ITERATIONS = 250
"""Of annealing, for each item; 512 items take about 20 ms of compiled code."""
LARGE = 0.95
"""A group above this share of a pair is several items."""
CHEAPEST = 0.15
"""This share of the groups without long sequences may be scattered, those with the least work in their beginnings."""
LONG = 0.15
"""A long sequence has more than this share of a mean level."""
LEAST, LOSS = 0.03, 0.005
"""Of a mean level: parts of scattered groups have more own work than the first, and leave about the second unused."""
RAISE, RAISED = 0.02, 10
"""Where scattered groups find no room, levels are raised by this share of a mean one, and so many times at most."""


def fill_pairs(groups: Groups, levels: Floats, caps: Caps) -> Integers | None:
    """int64 [n], the micro-batch of each sequence, none above `caps.max_tokens`; `caps.max_sequences` is not looked at.

    levels: float64 [M], positive, descending: the work that micro-batches are meant to have; some will have more. The
    highest and the lowest are a pair, and so on; of an odd number one is alone.
    None if there are too few or too many groups for a pair, or if a sequence fits nowhere.
    """
    count, level = -(-len(levels) // 2), float(levels.mean())
    parts, rows = _parts(groups, 2 * level, 2 * caps.max_tokens)
    if not FEWEST * count <= len(parts.shared) <= MOST * count:
        return None
    items = Items(
        work_of_groups(parts) + parts.shared,
        np.add.reduceat(parts.own_tokens, parts.start[:-1]) + parts.shared_tokens,
        parts.shared,
        parts.shared_tokens,
    )
    may_scatter, price = _cheap(parts, level)
    second = levels[::-1][:count].copy()
    second[len(levels) // 2 :] = 0.0
    pairs = Pairs(levels[:count].copy(), second, caps.max_tokens, price + LOSS * level, LEAST * level)
    order = np.argsort(-items.work, kind="stable")
    first_of = fill_lightest(order, np.ones(len(order), np.int64), items.work, count, MOST_IN_PAIR, MOST_IN_PAIR)
    draws = np.random.default_rng(0).random((ITERATIONS * len(order), DRAWS))
    pair_of = anneal(items, may_scatter, pairs, first_of, draws)
    room = Room(levels.copy(), np.full(len(levels), caps.max_tokens), np.full(len(levels), len(rows)))
    placed = _place(parts, items, pairs, pair_of, room)
    longest_first = np.argsort(-np.maximum.reduceat(parts.own, parts.start[:-1]), kind="stable")
    for _ in range(RAISED):
        fill_room(parts, longest_first, room, placed, -1)
        if (placed >= 0).all():
            micro_batch_of = np.empty_like(placed)
            micro_batch_of[rows] = placed
            return micro_batch_of
        room.load[:] += RAISE * level
    return None


def _parts(groups: Groups, work: float, tokens: int) -> tuple[Groups, Integers]:
    """Groups above LARGE of `work` or `tokens` in equal parts; int64 [n], the sequences in their order."""
    members, own = np.diff(groups.start), work_of_groups(groups)
    own_tokens = np.add.reduceat(groups.own_tokens, groups.start[:-1])
    room = np.maximum(LARGE * work - groups.shared, 1e-9 * work)
    room_tokens = np.maximum(LARGE * tokens - groups.shared_tokens, 1)
    needed = np.maximum(np.ceil(np.maximum(own / room, own_tokens / room_tokens)), 1)
    needed = np.minimum(needed, members).astype(np.int64)
    part = equal_parts(groups, needed)
    rows, of_part = np.argsort(part, kind="stable"), np.repeat(np.arange(len(members)), needed)
    start = np.searchsorted(part[rows], np.arange(len(of_part) + 1))
    shared, shared_tokens = groups.shared[of_part], groups.shared_tokens[of_part]
    return Groups(groups.own[rows], groups.own_tokens[rows], part[rows], start, shared, shared_tokens), rows


def _cheap(parts: Groups, level: float) -> tuple[NDArray[np.bool_], float]:
    """bool [I], those that may be scattered, and the most work of their beginnings."""
    short: NDArray[np.bool_] = np.maximum.reduceat(parts.own, parts.start[:-1]) <= LONG * level
    if not short.any():
        return short, 0.0
    most = float(np.quantile(parts.shared[short], CHEAPEST))
    return short & (parts.shared <= most), most


@compiled
def _place(parts: Groups, items: Items, pairs: Pairs, pair_of: Integers, room: Room) -> Integers:
    """int64 [n], the micro-batch of each sequence; -1 for scattered items, and for what is above the cap.

    Micro-batches p and M - 1 - p are pair p. room: changed.
    """
    placed, last = np.full(len(parts.own), -1), len(room.load) - 1
    for pair in range(len(pairs.first)):
        held = np.flatnonzero(pair_of == pair)
        found = best_cut(items, held, len(held), pair_at(pairs, pair))
        divided = placed[:0]
        for place in range(len(held)):
            item = held[place]
            rows = np.arange(parts.start[item], parts.start[item + 1])
            micro_batch = pair if found.first >> place & 1 else last - pair
            if place == found.one or place == found.other:
                divided = np.append(divided, rows)
            elif items.tokens[item] <= room.tokens[micro_batch]:
                placed[rows] = micro_batch
                take(parts, item, rows, room, micro_batch)
        divided = divided[np.argsort(-parts.own[divided], kind="mergesort")]
        load = found.share * parts.own[divided].sum()
        for micro_batch, most in ((pair, load), (last - pair, np.inf)):
            left = divided[placed[divided] < 0]
            tokens = room.tokens[micro_batch] - parts.shared_tokens[np.unique(parts.group[left])].sum()
            taken = cut(parts, left, most, tokens, len(left))
            placed[taken] = micro_batch
            for item in np.unique(parts.group[taken]):
                take(parts, item, taken[parts.group[taken] == item], room, micro_batch)
    return placed
