"""Place sequences one by one into bins (micro-batches) under caps, in compiled loops.

    fill_lightest    the lightest bin with room, until a sequence fits nowhere
    best_fit         the fullest bin with room, or a new bin
    fill_to_level    the lightest bin with room that stays within a load, or none

`order` is int64, indices into `sizes` (int64 [n], tokens, each at most `max_tokens`) and `weights` (float64
[n]). Each function returns int64 [n], the bin of every sequence, -1 for none.
"""

import heapq

import numpy as np

from balancing.basics.compiled import compiled
from balancing.basics.grouping import Floats, Integers

BLOCK = 256  # rooms, in tokens


@compiled
def fill_lightest(
    order: Integers,
    sizes: Integers,
    weights: Floats,
    bins: int,
    max_tokens: int,
    max_sequences: int,
) -> Integers:
    """Place each in the lightest bin with room (Graham 1969, under caps), and stop at the first that fits
    nowhere.

    Ties go to the bin with fewest sequences, so that weightless sequences leave no bin empty.
    """
    assignment = np.full(len(sizes), -1, np.int64)
    smallest = max_tokens
    for index in order:
        smallest = min(smallest, sizes[index])
    room = np.full(bins, max_tokens, np.int64)
    # (load, sequences, bin) of bins that may grow.
    heap = [(0.0, 0, position) for position in range(bins)]
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
def best_fit(
    order: Integers, sizes: Integers, max_tokens: int, max_sequences: int
) -> Integers:
    """Place each in the fullest bin with room, or open a bin. In descending order: <= 11/9 of the optimum.

    Bins are linked lists by their room, `newest[room] -> bin -> previous[bin] -> .. -> -1`, and rooms are
    counted in blocks, so that the search does not visit every bin.
    """
    assignment = np.full(len(sizes), -1, np.int64)
    newest = np.full(max_tokens + 1, -1)
    filled = np.zeros(max_tokens // BLOCK + 2, np.int64)
    previous = np.full(len(order), -1)
    places = np.full(len(order), max_sequences, np.int64)
    count = 0
    for index in order:
        room = sizes[index]
        while room <= max_tokens and newest[room] < 0:
            room += BLOCK - room % BLOCK if filled[room // BLOCK] == 0 else 1
        position = count
        if room > max_tokens:
            room = max_tokens
            count = count + 1
        else:
            position = newest[room]
            newest[room] = previous[position]
            filled[room // BLOCK] -= 1
        assignment[index] = position
        places[position] -= 1
        room -= sizes[index]
        if room > 0 and places[position] > 0:
            previous[position], newest[room] = newest[room], position
            filled[room // BLOCK] += 1
    return assignment


@compiled
def fill_to_level(
    order: Integers,
    sizes: Integers,
    weights: Floats,
    placed: Integers,
    bins: int,
    level: float,
    max_tokens: int,
    max_sequences: int,
) -> Integers:
    """Place each in the lightest bin with room whose load stays within `level`. placed: bins of placed ones,
    or -1.
    """
    assignment = placed.copy()
    load = np.zeros(bins)
    room = np.full(bins, max_tokens, np.int64)
    places = np.full(bins, max_sequences, np.int64)
    for index in np.flatnonzero(placed >= 0):
        load[placed[index]] += weights[index]
        room[placed[index]] -= sizes[index]
        places[placed[index]] -= 1
    leaves = 1
    while leaves < bins:
        leaves *= 2
    # A node of the tree has the least load and the most room below it. Its leaves are bins, neighbours by
    # their room.
    loads = np.full(2 * leaves, np.inf)
    rooms = np.full(2 * leaves, -1)
    bin_of = np.argsort(room, kind="mergesort")
    for place, position in enumerate(bin_of):
        if places[position] > 0:
            loads[leaves + place], rooms[leaves + place] = load[position], room[position]
    for node in range(leaves - 1, 0, -1):
        _summarise(node, loads, rooms)
    nodes = np.empty(128, np.int64)  # above twice the depth of the tree
    for index in order:
        size = sizes[index]
        weight = weights[index]
        if size > rooms[1] or loads[1] + weight > level:
            continue
        leaf = _lightest_with_room(loads, rooms, bin_of, size, nodes)
        if leaf < 0 or loads[leaf] + weight > level:
            continue
        assignment[index] = bin_of[leaf - leaves]
        places[assignment[index]] -= 1
        loads[leaf] += weight
        rooms[leaf] -= size
        if places[assignment[index]] == 0:  # a full bin
            loads[leaf], rooms[leaf] = np.inf, -1
        while leaf > 1:
            leaf //= 2
            _summarise(leaf, loads, rooms)
    return assignment


@compiled
def _summarise(node: int, loads: Floats, rooms: Integers) -> None:
    loads[node] = min(loads[2 * node], loads[2 * node + 1])
    rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])


@compiled
def _lightest_with_room(
    loads: Floats, rooms: Integers, bin_of: Integers, size: int, nodes: Integers
) -> int:
    """Return the leaf with the least load, of several that of the first bin, among those with room, or -1."""
    best = -1
    least = np.inf
    depth = 1
    leaves = len(loads) // 2
    nodes[0] = 1
    while depth > 0:
        depth -= 1
        node = nodes[depth]
        if rooms[node] < size or loads[node] > least:
            continue
        if node >= leaves:
            if (
                best < 0
                or loads[node] < least
                or bin_of[node - leaves] < bin_of[best - leaves]
            ):
                best = node
                least = loads[node]
            continue
        lighter = 2 * node + (loads[2 * node + 1] < loads[2 * node])
        nodes[depth], nodes[depth + 1] = 4 * node + 1 - lighter, lighter
        depth += 2
    return best
