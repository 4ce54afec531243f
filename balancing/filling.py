"""Place sequences one by one into bins (micro-batches) under caps, in compiled loops.

    fill_lightest    the lightest bin with room, until a sequence fits nowhere
    best_fit         the fullest bin with room, or a new bin
    fill_to_level    the lightest bin with room that stays within a load, or none

`order` is int64, indices into `sizes` (int64 [n], tokens, each at most `max_tokens`) and `weights` (float64 [n]).
Each function returns int64 [n], the bin of every sequence, -1 for none.
"""

import heapq

import numpy as np

from balancing.compiled import compiled
from balancing.grouping import Floats, Integers

BLOCK = 256  # rooms, in tokens


@compiled
def fill_lightest(
    order: Integers, sizes: Integers, weights: Floats, bins: int, max_tokens: int, max_sequences: int
) -> Integers:
    """Place each in the lightest bin with room (Graham 1969, under caps), and stop at the first that fits nowhere.

    Ties go to the bin with fewest sequences, so that weightless sequences leave no bin empty.
    """
    assignment = np.full(len(sizes), -1, np.int64)
    smallest = max_tokens
    for index in order:
        smallest = min(smallest, sizes[index])
    room = np.full(bins, max_tokens, np.int64)
    heap = [(0.0, 0, position) for position in range(bins)]  # (load, sequences, bin) of bins that may grow
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
    """Place each in the fullest bin with room, or open a bin. In descending order: <= 11/9 of the optimum.

    Bins are linked lists by their room, `newest[room] -> bin -> before[bin] -> .. -> -1`, and rooms are counted in
    blocks, so that the search does not visit every bin.
    """
    assignment = np.full(len(sizes), -1, np.int64)
    newest, filled = np.full(max_tokens + 1, -1), np.zeros(max_tokens // BLOCK + 2, np.int64)
    before, places = np.full(len(order), -1), np.full(len(order), max_sequences, np.int64)
    count = 0
    for index in order:
        room = sizes[index]
        while room <= max_tokens and newest[room] < 0:
            room += BLOCK - room % BLOCK if filled[room // BLOCK] == 0 else 1
        position = count
        if room > max_tokens:
            room, count = max_tokens, count + 1
        else:
            position = newest[room]
            newest[room] = before[position]
            filled[room // BLOCK] -= 1
        assignment[index] = position
        places[position] -= 1
        room -= sizes[index]
        if room > 0 and places[position] > 0:
            before[position], newest[room] = newest[room], position
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
    """Place each in the lightest bin with room whose load stays within `level`. placed: bins of placed ones, or -1."""
    assignment, loads = placed.copy(), np.zeros(bins)
    room, places = np.full(bins, max_tokens, np.int64), np.full(bins, max_sequences, np.int64)
    for index in np.flatnonzero(placed >= 0):
        loads[placed[index]] += weights[index]
        room[placed[index]] -= sizes[index]
        places[placed[index]] -= 1
    most_room, least_load = max_tokens, 0.0  # as of the last search: bins only fill up
    for index in order:
        size, weight = sizes[index], weights[index]
        if size > most_room or least_load + weight > level:
            continue
        lightest, most_room, least_load = -1, -1, np.inf
        for position in range(bins):
            if places[position] > 0:
                most_room, least_load = max(most_room, room[position]), min(least_load, loads[position])
            fits = room[position] >= size and places[position] > 0 and loads[position] + weight <= level
            if fits and (lightest < 0 or loads[position] < loads[lightest]):
                lightest = position
        if lightest >= 0:
            assignment[index] = lightest
            loads[lightest] += weight
            room[lightest] -= size
            places[lightest] -= 1
    return assignment
