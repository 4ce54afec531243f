"""k-way number partitioning: n weights into k sets whose sums are as equal as can be.

    weights, descending --+-- karmarkar_karp   largest differencing over k-tuples    free or equal counts
                          +-- longest_first    heaviest first, to the lightest set   free or equal counts
                          +-- sort_and_deal    dealt like cards                      equal counts
                          +-- refined          the first two, then exchanges, then   free or equal counts
                                               pairs of small sets split anew

Equal counts differ by at most one when k does not divide n. All are deterministic.
"""

import heapq
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancing.compiled import compiled
from balancing.crowding import crowded_bound, lower_bound
from balancing.differencing import largest_differencing
from balancing.errors import CountError, WeightError
from balancing.exchange import TOLERANCE, Limits, even_out_arrays
from balancing.resplitting import resplit_until_even
from balancing.threaded import Floats, Integers
from balancing.validation import one_of, positive_integer, weight_array

EFFORT_EACH = 5_000
"""Exchanges that `refined` looks at for each weight before it ends a search; see `even_out_arrays`."""
MOST_EFFORT = 50_000_000
"""The most that it looks at, some 0.2 s of compiled code."""

Algorithm = Literal["refined", "karmarkar_karp", "longest_first", "sort_and_deal"]


def partition(
    weights: ArrayLike,
    k: int,
    *,
    equal_size: bool = False,
    algorithm: Algorithm = "refined",
    allow_empty: bool = False,
) -> list[NDArray[np.int64]]:
    """Split the indices of `weights` into k sets with sums as equal as can be.

    weights: n finite numbers >= 0, tokens or workload. equal_size: counts differ by at most one.
    Returns k int64 arrays, indices ascending in each; every index is in exactly one.
    Raises WeightError for bad weights, OptionError for a bad k or algorithm, CountError if k > n (some set would be
    empty) unless `allow_empty`.
    """
    checked = weight_array(weights, "weights")
    one_of(algorithm, "algorithm", tuple(_ALGORITHMS))
    sets = positive_integer(k, "k")
    if checked.size == 0:
        raise WeightError("weights is empty; pass at least one weight")
    if sets > checked.size and not allow_empty:
        raise CountError(f"k={sets} is more than the {checked.size} weights; lower k or set allow_empty=True")
    order = _heaviest_first(checked)  # then ties apart, sets do not depend on the order that is given
    set_of = np.empty(checked.size, np.int64)
    set_of[order] = _ALGORITHMS[algorithm](checked[order], sets, equal_size)
    return indices_by_set(set_of, sets)


def indices_by_set(set_of: Integers, k: int) -> list[NDArray[np.int64]]:
    """The indices of each set, ascending. set_of: int64 [n], the set of each index, 0..k."""
    narrow = set_of.astype(np.int16) if k < 2**15 else set_of  # NumPy sorts 16 bits in linear time
    order = np.argsort(narrow, kind="stable")
    ends = np.cumsum(np.bincount(set_of, minlength=k)).tolist()
    return [order[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


def _heaviest_first(weights: Floats) -> Integers:
    """Indices in descending order of weight, ties in given order; NumPy sorts 16 bits in linear time."""
    if weights.max() < 2**16 and (weights == np.floor(weights)).all():
        return np.argsort((2**16 - 1 - weights).astype(np.uint16), kind="stable")
    return np.argsort(-weights, kind="stable")


def karmarkar_karp(weights: Floats, k: int, equal_size: bool = False) -> Integers:
    """The largest differencing method (Karmarkar and Karp 1982; Michiels et al. 2003 for equal counts).

    weights: float64 [n], descending. Returns the set of each, 0..k; int64 [n].
    """
    count = len(weights)
    if k == 1 or count == 1:
        return np.zeros(count, np.int64)
    padded = np.concatenate([weights, np.zeros(-count % k)]) if equal_size else weights
    return largest_differencing(padded, k, equal_size)[:count]


@compiled
def longest_first(weights: Floats, k: int, equal_size: bool = False) -> Integers:
    """Heaviest first, each into the lightest set that may still grow (Graham 1969); as `karmarkar_karp`."""
    set_of = np.empty(len(weights), np.int64)
    smallest, larger_sets = len(weights) // k, len(weights) % k
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


def sort_and_deal(weights: NDArray[np.float64], k: int) -> list[list[int]]:
    """Ascending, ties in given order, dealt with stride k; members stay in that order. Counts are always equal.

    weights: float64 [n], in any order.
    """
    order = np.argsort(weights, kind="stable")
    return [order[position::k].tolist() for position in range(k)]


def refined(weights: Floats, k: int, equal_size: bool = False) -> Integers:
    """Exchanges until within 1e-5 of the lower bound or none helps; as `karmarkar_karp`.

    Starts from Karmarkar-Karp; where that does not reach the bound, also from longest-first, and the better is kept.
    Where sets are small, pairs of them are then split anew in the best of all ways.
    """
    start = karmarkar_karp(weights, k, equal_size)
    if k >= len(weights) or _heaviest(weights, start) <= lower_bound(weights, k) * (1 + TOLERANCE):
        return start
    level = crowded_bound(weights, k, equal_size) * (1 + TOLERANCE)
    best, lowest = start, np.inf
    for set_of in sorted((start, longest_first(weights, k, equal_size)), key=lambda sets: _heaviest(weights, sets)):
        evened = _exchanged(weights, set_of, k, equal_size, level)
        if _heaviest(weights, evened) < lowest:
            best, lowest = evened, _heaviest(weights, evened)
        if lowest <= level:
            return best
    return resplit_until_even(weights, best, k, equal_size, level)


def _exchanged(weights: Floats, set_of: Integers, k: int, equal_size: bool, level: float) -> Integers:
    return even_out_arrays(
        set_of,
        k,
        weights,
        np.zeros(len(weights), np.int64),
        Limits(equal_size=equal_size),
        only_heaviest=True,
        target=level,
        effort=min(MOST_EFFORT, EFFORT_EACH * len(weights)),
    )


def _heaviest(weights: Floats, set_of: Integers) -> float:
    return float(np.bincount(set_of, weights=weights).max())


def _dealt(weights: Floats, k: int, equal_size: bool) -> Integers:
    """`sort_and_deal` as the set of each weight."""
    set_of = np.empty(len(weights), np.int64)
    set_of[np.argsort(weights, kind="stable")] = np.arange(len(weights)) % k
    return set_of


_ALGORITHMS: dict[str, Callable[[Floats, int, bool], Integers]] = {
    "refined": refined,
    "karmarkar_karp": karmarkar_karp,
    "longest_first": longest_first,
    "sort_and_deal": _dealt,
}
