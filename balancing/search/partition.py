"""Partition n weights into k sets whose sums are as equal as possible.

    karmarkar_karp    largest differencing                                         free or equal counts
    longest_first     heaviest first, to the lightest set                          free or equal counts
    refined           karmarkar_karp or longest_first, then exchanges              free or equal counts

Largest differencing (Karmarkar and Karp 1982) for k sets takes O(n log n) for free counts:

    partial solutions, by difference    A: a1 >= a2 >= .. >= ak    joined, heaviest with lightest:
    (heaviest - lightest set)           B: b1 >= b2 >= .. >= bk    a1+bk, a2+b(k-1), .., ak+b1, sorted again

Initially each weight is a solution with k-1 empty sets. The two solutions with the largest differences are
joined until one is left. For equal counts each run of k sorted weights is a solution (Michiels, Korst, Aarts
and van Leeuwen 2003), and weights of 0 complete the last run. Empty sets are not stored, and a solution of
one weight is an index.
"""

import heapq
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from balancing.basics.compiled import compiled
from balancing.basics.grouping import Caps, Floats, Grouping, Integers
from balancing.basics.validation import one_of, positive_integer, weight_array
from balancing.errors import CountError, WeightError
from balancing.search.exchange import TOLERANCE, even_out
from balancing.search.lower_bounds import mean_bound

EFFORT_EACH = 5_000
MOST_EFFORT = 50_000_000
"""Limit of the total effort, about 0.2 s of compiled code."""

Algorithm = Literal["refined", "karmarkar_karp", "longest_first"]


def partition(
    weights: ArrayLike,
    k: int,
    *,
    equal_size: bool = False,
    algorithm: Algorithm = "refined",
    allow_empty: bool = False,
) -> list[Integers]:
    """Split the indices of `weights` into k sets with sums as equal as possible.

    weights: n finite numbers >= 0. equal_size: counts differ by at most one.
    Returns k int64 arrays with ascending indices. Every index is in exactly one.
    Raises WeightError, OptionError for a bad k or algorithm, and CountError if k > n without `allow_empty`.
    """
    checked = weight_array(weights, "weights")
    one_of(algorithm, "algorithm", tuple(_ALGORITHMS))
    sets = positive_integer(k, "k")
    if checked.size == 0:
        raise WeightError("weights is empty. Pass at least one weight.")
    if sets > checked.size and not allow_empty:
        raise CountError(
            f"k={sets} is more than the {checked.size} weights. Lower k or set allow_empty=True."
        )
    # Except for ties, the given order then does not matter.
    order = _heaviest_first(checked)
    set_of = np.empty(checked.size, np.int64)
    set_of[order] = _ALGORITHMS[algorithm](checked[order], sets, equal_size)
    return Grouping(set_of, sets).members()


def _heaviest_first(weights: Floats) -> Integers:
    if weights.max() < 2**16 and (weights == np.floor(weights)).all():
        # NumPy sorts 16 bits in linear time.
        return np.argsort((2**16 - 1 - weights).astype(np.uint16), kind="stable")
    return np.argsort(-weights, kind="stable")


def karmarkar_karp(weights: Floats, k: int, equal_size: bool = False) -> Integers:
    """Partition by largest differencing (Karmarkar and Karp 1982, and Michiels et al. 2003 for equal counts).

    weights: float64 [n], descending. Returns int64 [n], the set of each weight, in 0..k.
    """
    count = len(weights)
    if k == 1 or count == 1:
        return np.zeros(count, np.int64)
    padded = np.concatenate([weights, np.zeros(-count % k)]) if equal_size else weights
    return largest_differencing(padded, k, equal_size)[:count]


@compiled
def longest_first(weights: Floats, k: int, equal_size: bool = False) -> Integers:
    """Place the heaviest first, each in the lightest set that may grow (Graham 1969). See
    `karmarkar_karp`.
    """
    set_of = np.empty(len(weights), np.int64)
    smallest = len(weights) // k
    larger_sets = len(weights) % k
    heap = [(0.0, 0, position) for position in range(k)]
    for index in range(len(weights)):
        load, size, position = heap[0]
        while equal_size and (size > smallest or (size == smallest and larger_sets == 0)):
            heapq.heappop(heap)
            load, size, position = heap[0]
        if size == smallest:
            larger_sets -= 1
        set_of[index] = position
        heapq.heapreplace(heap, (load + weights[index], size + 1, position))
    return set_of


def refined(weights: Floats, k: int, equal_size: bool = False) -> Integers:
    """Exchange, from Karmarkar-Karp and longest-first, until the heaviest set is within 1e-5 of
    `mean_bound`.
    """
    start = karmarkar_karp(weights, k, equal_size)
    level = mean_bound(weights, k) * (1 + TOLERANCE)
    if k >= len(weights) or _heaviest(weights, start) <= level:
        return start
    best = start
    lowest = np.inf
    for set_of in sorted(
        (start, longest_first(weights, k, equal_size)),
        key=lambda sets: _heaviest(weights, sets),
    ):
        evened = _exchanged(weights, set_of, k, equal_size, level)
        if _heaviest(weights, evened) < lowest:
            best = evened
            lowest = _heaviest(weights, evened)
        if lowest <= level:
            return best
    return best


def _exchanged(
    weights: Floats, set_of: Integers, k: int, equal_size: bool, level: float
) -> Integers:
    count = len(weights)
    effort = min(MOST_EFFORT, EFFORT_EACH * len(weights))
    sizes = np.zeros(count, np.int64)
    sets = Grouping(set_of, k)
    evened = even_out(
        sets,
        weights,
        sizes,
        Caps(0, count),
        equal_size=equal_size,
        only_heaviest=True,
        target=level,
        effort=effort,
    )
    return evened.group_of


def _heaviest(weights: Floats, set_of: Integers) -> float:
    return float(np.bincount(set_of, weights=weights).max())


_ALGORITHMS: dict[str, Callable[[Floats, int, bool], Integers]] = {
    "refined": refined,
    "karmarkar_karp": karmarkar_karp,
    "longest_first": longest_first,
}


@compiled
def largest_differencing(weights: Floats, k: int, in_runs: bool) -> Integers:
    """Return the set, 0..k, of each of n weights in descending order, int64 [n].

    weights: float64 [n]. With `in_runs`, n is a multiple of k. k: at least 2. Ties: the youngest solution
    first, which bounds the number of solutions.

    A set is a linked list with first member `head`: `sums[head]`, `last[head]`, and the member `following`
    each member. A solution is a row of heads, heaviest set first. `filled[row]` sets are not empty.
    """
    count = len(weights)
    sums = weights.copy()
    last = np.arange(count)
    following = np.full(count, -1)
    solutions = count // k + 2
    # the initial runs
    rows = np.arange(solutions * k).reshape(solutions, k)
    filled = np.full(solutions, k)
    free = list(range(len(rows)))
    age = 0
    single = 0
    heap = [(0.0, 0, 0)]  # (-difference, -age, row), an entry that only declares the types
    heap.clear()
    if in_runs:
        for run in range(count // k):
            heap.append((weights[run * k + k - 1] - weights[run * k], -run, run))
        heapq.heapify(heap)
        free = free[count // k :]
        age = count // k
        single = count
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
        # With empty sets its difference does not change, so it would be taken again at once.
        while (
            filled[row] < k
            and single < count
            and (len(heap) == 0 or -heap[0][0] < weights[single])
        ):
            _insert_weight(single, row, rows, filled, sums, last, following)
            single += 1
        lightest = sums[rows[row, k - 1]] if filled[row] == k else 0.0
        heapq.heappush(heap, (lightest - sums[rows[row, 0]], -age, row))
        age += 1
    row = heap[0][2]
    return _set_of_each(rows[row, : filled[row]], following)


@compiled
def _take(
    heap: list[tuple[float, int, int]], weights: Floats, single: int
) -> tuple[int, int]:
    if len(heap) and (single == len(weights) or -heap[0][0] >= weights[single]):
        return heapq.heappop(heap)[2], single
    return -1, single + 1


@compiled
def _insert_weight(
    weight: int,
    row: int,
    rows: Integers,
    filled: Integers,
    sums: Floats,
    last: Integers,
    following: Integers,
) -> None:
    end = filled[row]
    head = weight
    if end == rows.shape[1]:
        end -= 1
        head = rows[row, end]
        following[last[head]], last[head] = weight, weight
        sums[head] += sums[weight]
    else:
        filled[row] = end + 1
    low = 0
    high = end
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
    full: int,
    donor: int,
    rows: Integers,
    filled: Integers,
    sums: Floats,
    last: Integers,
    following: Integers,
) -> None:
    for position in range(filled[donor]):
        heavy = rows[donor, position]
        light = rows[full, -1 - position]
        following[last[light]], last[light] = heavy, last[heavy]
        sums[light] += sums[heavy]
    heads = rows[full][np.argsort(-sums[rows[full]], kind="mergesort")]
    # Numba takes seconds to compile the assignment of a whole row.
    for position in range(len(heads)):
        rows[full, position] = heads[position]


@compiled
def _set_of_each(heads: Integers, following: Integers) -> Integers:
    set_of = np.zeros(len(following), np.int64)
    for number in range(len(heads)):
        member = heads[number]
        while member >= 0:
            set_of[member] = number
            member = following[member]
    return set_of
