"""k-way number partitioning: n weights into k sets whose sums are as equal as can be.

    karmarkar_karp    largest differencing                                         free or equal counts
    longest_first     heaviest first, to the lightest set                          free or equal counts
    sort_and_deal     sorted, dealt like cards                                     equal counts
    refined           karmarkar_karp or longest_first, then exchanges, then        free or equal counts
                      optimal splits of pairs of small sets

Equal counts differ by at most one if k does not divide n. All are deterministic.
"""

import heapq
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from balancing.compiled import compiled
from balancing.differencing import largest_differencing
from balancing.errors import CountError, WeightError
from balancing.exchange import TOLERANCE, Limits, even_out_arrays
from balancing.grouping import Floats, Grouping, Integers
from balancing.lower_bounds import mean_bound, pigeonhole_bound
from balancing.resplitting import resplit_until_even
from balancing.validation import one_of, positive_integer, weight_array

EFFORT_EACH = 5_000
"""Effort of `refined` for each weight; see `even_out_arrays`."""
MOST_EFFORT = 50_000_000
"""Limit of its total effort, about 0.2 s of compiled code."""

Algorithm = Literal["refined", "karmarkar_karp", "longest_first", "sort_and_deal"]


def partition(
    weights: ArrayLike,
    k: int,
    *,
    equal_size: bool = False,
    algorithm: Algorithm = "refined",
    allow_empty: bool = False,
) -> list[Integers]:
    """Split the indices of `weights` into k sets with sums as equal as possible.

    weights: n finite numbers >= 0, tokens or workload. equal_size: counts differ by at most one.
    Returns k int64 arrays with ascending indices; every index is in exactly one.
    Raises WeightError for bad weights, OptionError for a bad k or algorithm, and, without `allow_empty`, CountError if
    k > n.
    """
    checked = weight_array(weights, "weights")
    one_of(algorithm, "algorithm", tuple(_ALGORITHMS))
    sets = positive_integer(k, "k")
    if checked.size == 0:
        raise WeightError("weights is empty; pass at least one weight")
    if sets > checked.size and not allow_empty:
        raise CountError(f"k={sets} is more than the {checked.size} weights; lower k or set allow_empty=True")
    order = _heaviest_first(checked)  # so that, except for ties, the given order does not matter
    set_of = np.empty(checked.size, np.int64)
    set_of[order] = _ALGORITHMS[algorithm](checked[order], sets, equal_size)
    return Grouping(set_of, sets).members()


def _heaviest_first(weights: Floats) -> Integers:
    """Indices in descending order of weight, ties in given order."""
    if weights.max() < 2**16 and (weights == np.floor(weights)).all():
        return np.argsort((2**16 - 1 - weights).astype(np.uint16), kind="stable")  # NumPy sorts 16 bits in linear time
    return np.argsort(-weights, kind="stable")


def karmarkar_karp(weights: Floats, k: int, equal_size: bool = False) -> Integers:
    """The largest differencing method (Karmarkar and Karp 1982; Michiels et al. 2003 for equal counts).

    weights: float64 [n], descending. Returns int64 [n], the set of each weight, in 0..k.
    """
    count = len(weights)
    if k == 1 or count == 1:
        return np.zeros(count, np.int64)
    padded = np.concatenate([weights, np.zeros(-count % k)]) if equal_size else weights
    return largest_differencing(padded, k, equal_size)[:count]


@compiled
def longest_first(weights: Floats, k: int, equal_size: bool = False) -> Integers:
    """Heaviest first, each to the lightest set that may grow (Graham 1969). Arguments and result: `karmarkar_karp`."""
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


def refined(weights: Floats, k: int, equal_size: bool = False) -> Integers:
    """Exchanges until the heaviest set is within 1e-5 of the lower bound. Arguments and result: `karmarkar_karp`.

    Starts from Karmarkar-Karp and, if that does not reach the bound, also from longest-first; keeps the better.
    Finally splits pairs of small sets optimally.
    """
    start = karmarkar_karp(weights, k, equal_size)
    if k >= len(weights) or _heaviest(weights, start) <= mean_bound(weights, k) * (1 + TOLERANCE):
        return start
    level = pigeonhole_bound(weights, k, equal_size) * (1 + TOLERANCE)
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


def sort_and_deal(weights: Floats, k: int, equal_size: bool = True) -> Integers:
    """Sort in ascending order, ties in given order, and deal with stride k. Arguments and result: `karmarkar_karp`."""
    set_of = np.empty(len(weights), np.int64)
    set_of[np.argsort(weights, kind="stable")] = np.arange(len(weights)) % k
    return set_of


_ALGORITHMS: dict[str, Callable[[Floats, int, bool], Integers]] = {
    "refined": refined,
    "karmarkar_karp": karmarkar_karp,
    "longest_first": longest_first,
    "sort_and_deal": sort_and_deal,
}
