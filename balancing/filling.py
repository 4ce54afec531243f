"""Placing sequences into micro-batches one after another, under caps: the loops, compiled.

    order of sequences --+-- fill_lightest         into the lightest with room        None is left out, or it failed
                         +-- best_fit              into the fullest with room         as many as it takes
                         +-- fill_to_level         into the lightest within a level   the rest is left out
                         +-- fill_exactly          and back again, until all fit      all, unless it gives up

`order` is int64, indices into `sizes` (int64 [n], tokens, each at most `max_tokens`) and `weights` (float64 [n]).
Each returns int64 [n]: the micro-batch of every sequence, -1 where it has none.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from balancing.compiled import compiled

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

EXACT_SEARCH_NODES = 20_000
"""Placements that the exact search tries before it gives up."""


@compiled
def fill_lightest(
    order: Integers, sizes: Integers, weights: Floats, bins: int, max_tokens: int, max_sequences: int
) -> Integers:
    """Each into the lightest of `bins` that has room (Graham 1969, under caps); stops at the first that finds none.

    Ties go to the bin with fewest sequences, so that none stays empty where some weigh nothing.
    """
    assignment = np.full(len(sizes), -1, np.int64)
    smallest = max_tokens
    for index in order:
        smallest = min(smallest, sizes[index])
    room = np.full(bins, max_tokens, np.int64)
    heap = [(0.0, 0, position) for position in range(bins)]  # load, sequences, bin: those that may still grow
    passed = heap[:0]
    for index in order:
        while len(heap) > 0 and room[heap[0][2]] < sizes[index]:
            passed.append(heapq.heappop(heap))
        if len(heap) == 0:
            break
        load, members, position = heapq.heappop(heap)
        assignment[index] = position
        room[position] -= sizes[index]
        if members + 1 < max_sequences and room[position] >= smallest:
            heapq.heappush(heap, (load + weights[index], members + 1, position))
        while len(passed) > 0:
            heapq.heappush(heap, passed.pop())
    return assignment


@compiled
def best_fit(order: Integers, sizes: Integers, max_tokens: int, max_sequences: int) -> Integers:
    """Each into the fullest bin that has room, else into a new one; largest first, at most about 11/9 of the fewest."""
    assignment = np.full(len(sizes), -1, np.int64)
    room, places = np.full(len(order), max_tokens, np.int64), np.full(len(order), max_sequences, np.int64)
    count = 0
    for index in order:
        size = sizes[index]
        fullest = count  # the next new one
        for position in range(count):
            if size <= room[position] < room[fullest] and places[position] > 0:
                fullest = position
        assignment[index] = fullest
        room[fullest] -= size
        places[fullest] -= 1
        count = max(count, fullest + 1)
    return assignment


@compiled
def fill_to_level(
    order: Integers,
    sizes: Integers,
    weights: Floats,
    bins: int,
    level: float,
    max_tokens: int,
    max_sequences: int,
) -> Integers:
    """Each into the lightest of `bins` that has room and stays within `level`; what fits in none is left out."""
    assignment = np.full(len(sizes), -1, np.int64)
    loads = np.zeros(bins)
    room, places = np.full(bins, max_tokens, np.int64), np.full(bins, max_sequences, np.int64)
    for index in order:
        size, weight = sizes[index], weights[index]
        lightest = -1
        for position in range(bins):
            fits = room[position] >= size and places[position] > 0 and loads[position] + weight <= level
            if fits and (lightest < 0 or loads[position] < loads[lightest]):
                lightest = position
        if lightest >= 0:
            assignment[index] = lightest
            loads[lightest] += weight
            room[lightest] -= size
            places[lightest] -= 1
    return assignment


@compiled
def fill_exactly(order: Integers, sizes: Integers, bins: int, max_tokens: int, max_sequences: int) -> Integers:
    """Depth-first search: each into the fullest bin with room, then the next; back where one finds none.

    Of bins with equal room and number of sequences one is tried. A branch ends where the room of all bins that may
    still grow is less than what is left. All are -1 where nothing was found within `EXACT_SEARCH_NODES`.
    """
    count, nodes = len(order), EXACT_SEARCH_NODES
    room, places = np.full(bins, max_tokens, np.int64), np.full(bins, max_sequences, np.int64)
    chosen = np.full(count, -1, np.int64)
    tried_room, tried_places = np.full(count + 1, -1, np.int64), np.full(count + 1, -1, np.int64)
    left = np.zeros(count + 1, np.int64)
    for depth in range(count - 1, -1, -1):
        left[depth] = left[depth + 1] + sizes[order[depth]]
    depth = 0
    while 0 <= depth < count and nodes > 0:
        size, best, free = sizes[order[depth]], -1, 0
        for position in range(bins):
            if places[position] == 0:
                continue
            free += room[position]
            later = room[position] > tried_room[depth] or (
                room[position] == tried_room[depth] and places[position] > tried_places[depth]
            )
            fuller = (
                best < 0
                or room[position] < room[best]
                or (room[position] == room[best] and places[position] < places[best])
            )
            if room[position] >= size and later and fuller:
                best = position
        if best >= 0 and free >= left[depth]:
            nodes -= 1
            tried_room[depth], tried_places[depth], chosen[depth] = room[best], places[best], best
            room[best] -= size
            places[best] -= 1
            depth += 1
            tried_room[depth], tried_places[depth] = -1, -1
        else:
            depth -= 1
            if depth >= 0:
                room[chosen[depth]] += sizes[order[depth]]
                places[chosen[depth]] += 1
    assignment = np.full(len(sizes), -1, np.int64)
    if depth == count:
        assignment[order] = chosen
    return assignment
