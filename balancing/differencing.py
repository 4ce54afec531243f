"""The largest differencing method (Karmarkar and Karp 1982) for k sets, in O(n log n) for free counts.

    partial solutions, by difference    A: a1 >= a2 >= .. >= ak    joined, heaviest with lightest:
    (heaviest - lightest set)           B: b1 >= b2 >= .. >= bk    a1+bk, a2+b(k-1), .., ak+b1, sorted again

The two partial solutions with the largest differences are joined until one is left. Initially each weight is a
solution with k-1 empty sets. For equal counts each run of k weights in sorted order is a solution (Michiels, Korst,
Aarts and van Leeuwen 2003); weights of 0 complete the last run and are dropped at the end.

Empty sets are not stored, and solutions of one weight are an index into the sorted weights. At any time one solution
has empty sets and at most n / k have none, and joining a single weight is a binary insertion.
"""

import heapq

import numpy as np

from balancing.compiled import compiled
from balancing.grouping import Floats, Integers


@compiled
def largest_differencing(weights: Floats, k: int, in_runs: bool) -> Integers:
    """The set, 0..k, of each of n weights in descending order; int64 [n].

    weights: float64 [n]; with `in_runs`, n is a multiple of k. k: at least 2. Ties: the youngest solution first, which
    bounds the number of solutions.

    A set is a linked list, identified by its first member `head`: it has `sums[head]` and `last[head]`, and each member
    has the one `following` it. A solution is a row of heads, heaviest set first; `filled[row]` sets are not empty.
    """
    count = len(weights)
    sums, last, following = weights.copy(), np.arange(count), np.full(count, -1)
    solutions = count // k + 2
    rows, filled = np.arange(solutions * k).reshape(solutions, k), np.full(solutions, k)  # the initial runs
    free, age, single = list(range(len(rows))), 0, 0
    heap = [(0.0, 0, 0)]  # (-difference, -age, row); this entry only declares the types
    heap.clear()
    if in_runs:
        for run in range(count // k):
            heap.append((weights[run * k + k - 1] - weights[run * k], -run, run))
        heapq.heapify(heap)
        free, age, single = free[count // k :], count // k, count
    while len(heap) + count - single > 1:
        one, single = _take(heap, weights, single)
        other, single = _take(heap, weights, single)
        row = max(one, other)
        if row < 0:
            row = free.pop()
            rows[row, 0], rows[row, 1], filled[row] = single - 2, single - 1, 2
        elif min(one, other) < 0:
            _insert_weight(single - 1, row, rows, filled, sums, last, following)
        else:
            row, joined = (one, other) if filled[one] == k else (other, one)
            _join(row, joined, rows, filled, sums, last, following)
            free.append(joined)
        # While it has empty sets its difference does not change, and it would be taken again at once.
        while filled[row] < k and single < count and (len(heap) == 0 or -heap[0][0] < weights[single]):
            _insert_weight(single, row, rows, filled, sums, last, following)
            single += 1
        lightest = sums[rows[row, k - 1]] if filled[row] == k else 0.0
        heapq.heappush(heap, (lightest - sums[rows[row, 0]], -age, row))
        age += 1
    row = heap[0][2]
    return _set_of_each(rows[row, : filled[row]], following)


@compiled
def _take(heap: list[tuple[float, int, int]], weights: Floats, single: int) -> tuple[int, int]:
    """Pop the solution with the largest difference: its row, or -1 for a single weight; and the next single weight."""
    if len(heap) and (single == len(weights) or -heap[0][0] >= weights[single]):
        return heapq.heappop(heap)[2], single
    return -1, single + 1


@compiled
def _insert_weight(
    weight: int, row: int, rows: Integers, filled: Integers, sums: Floats, last: Integers, following: Integers
) -> None:
    """Join a single weight with solution `row`: it goes to the lightest set, or to an empty one."""
    end, head = filled[row], weight
    if end == rows.shape[1]:
        end -= 1
        head = rows[row, end]
        following[last[head]], last[head] = weight, weight
        sums[head] += sums[weight]
    else:
        filled[row] = end + 1
    low, high = 0, end
    if end > 0 and sums[rows[row, end - 1]] >= sums[head]:
        low = end
    while low < high:
        middle = (low + high) // 2
        if sums[rows[row, middle]] >= sums[head]:
            low = middle + 1
        else:
            high = middle
    for position in range(end, low, -1):
        rows[row, position] = rows[row, position - 1]
    rows[row, low] = head


@compiled
def _join(
    full: int, other: int, rows: Integers, filled: Integers, sums: Floats, last: Integers, following: Integers
) -> None:
    """Join the heaviest sets of `other` with the lightest of `full`, which has no empty set, and sort again."""
    for position in range(filled[other]):
        heavy, light = rows[other, position], rows[full, -1 - position]
        following[last[light]], last[light] = heavy, last[heavy]
        sums[light] += sums[heavy]
    heads = rows[full][np.argsort(-sums[rows[full]], kind="mergesort")]
    for position in range(len(heads)):  # Numba takes seconds to compile the assignment of a whole row
        rows[full, position] = heads[position]


@compiled
def _set_of_each(heads: Integers, following: Integers) -> Integers:
    """int64 [n], the number of the set of each weight."""
    set_of = np.zeros(len(following), np.int64)
    for number in range(len(heads)):
        member = heads[number]
        while member >= 0:
            set_of[member] = number
            member = following[member]
    return set_of
