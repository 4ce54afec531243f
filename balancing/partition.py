"""k-way number partitioning: n weights into k sets whose sums are as equal as can be.

    partition --+-- karmarkar_karp   largest differencing over k-tuples        free or equal counts
                +-- longest_first    heaviest first into the lightest set      free or equal counts
                +-- sort_and_deal    sorted, dealt like cards                  equal counts
                +-- refined          the two above, then exchanges             free or equal counts

Equal counts differ by at most one when k does not divide n. All are deterministic.
"""

import heapq
from bisect import insort
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancing.errors import CountError, WeightError
from balancing.exchange import TOLERANCE, Groups, Limits, even_out
from balancing.validation import one_of, positive_integer, weight_array

Algorithm = Literal["refined", "karmarkar_karp", "longest_first", "sort_and_deal"]
_Set = tuple[float, int, list[int]]
"""(minus the sum, an index unique to the set, members): ascending order is heaviest first, ties by index."""


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
    order = np.argsort(-checked, kind="stable")  # then ties apart, sets do not depend on the order that is given
    groups = _ALGORITHMS[algorithm](checked[order], sets, equal_size)
    return [np.sort(order[group]) for group in groups]


def karmarkar_karp(weights: NDArray[np.float64], k: int, equal_size: bool = False) -> Groups:
    """The largest differencing method (Karmarkar and Karp 1982) for k sets.

    Partial solutions are k-tuples of sets. The two with the largest difference between their heaviest and lightest
    set are joined, heaviest with lightest, until one is left. With `equal_size` the first solutions are runs of k
    weights in sorted order (Michiels et al. 2003), which keeps counts equal; the last run may be short.
    Empty sets of a tuple are not stored: joining a single weight is then a binary insertion, and the whole is
    O(n log n) where copying and sorting k sets at every join would be O(n k log k).
    """
    solutions = _runs_of_k(weights, k) if equal_size else [[(-float(w), i, [i])] for i, w in enumerate(weights)]
    heap = [(_minus_difference(sets, k), number, sets) for number, sets in enumerate(solutions)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = _join_solutions(first, second, k)
        heapq.heappush(heap, (_minus_difference(joined, k), number, joined))
        number += 1
    groups = [members for _, _, members in heap[0][2]]
    return groups + [[] for _ in range(k - len(groups))]


def longest_first(weights: NDArray[np.float64], k: int, equal_size: bool = False) -> Groups:
    """Heaviest first, each into the lightest set that may still grow (Graham 1969)."""
    groups: Groups = [[] for _ in range(k)]
    smallest, larger_sets = divmod(len(weights), k)
    heap = [(0.0, 0, position) for position in range(k)]
    for index in np.argsort(-weights, kind="stable").tolist():
        load, size, position = heapq.heappop(heap)
        while equal_size and size == smallest and larger_sets == 0:
            load, size, position = heapq.heappop(heap)
        if size == smallest:
            larger_sets -= 1
        groups[position].append(index)
        if not equal_size or size < smallest:
            heapq.heappush(heap, (load + float(weights[index]), size + 1, position))
    return groups


def sort_and_deal(weights: NDArray[np.float64], k: int, equal_size: bool = True) -> Groups:
    """Ascending, ties in given order, dealt with stride k; members stay in that order. Counts are always equal."""
    order = np.argsort(weights, kind="stable")
    return [order[position::k].tolist() for position in range(k)]


def refined(weights: NDArray[np.float64], k: int, equal_size: bool = False) -> Groups:
    """Exchanges until within 1e-5 of the lower bound max(mean, heaviest) or none helps.

    Starts from Karmarkar-Karp; where that does not reach the bound, also from longest-first, and the better is kept.
    """
    limits, no_size = Limits(equal_size=equal_size), np.zeros(len(weights), np.int64)
    bound = max(float(weights.sum()) / k, float(weights.max())) * (1 + TOLERANCE)
    best: Groups = []
    lowest = np.inf
    for start in (karmarkar_karp, longest_first):
        groups = even_out(start(weights, k, equal_size), weights, no_size, limits, only_heaviest=True)
        heaviest = max(float(weights[group].sum()) for group in groups)
        if heaviest < lowest:
            best, lowest = groups, heaviest
        if lowest <= bound:
            break
    return best


def _runs_of_k(weights: NDArray[np.float64], k: int) -> list[list[_Set]]:
    order = np.argsort(-weights, kind="stable").tolist()
    runs = [[(-float(weights[i]), i, [i]) for i in order[start : start + k]] for start in range(0, len(order), k)]
    runs[-1] += [(0.0, len(order) + missing, []) for missing in range(k - len(runs[-1]))]
    return runs


def _minus_difference(sets: list[_Set], k: int) -> float:
    lightest = sets[-1][0] if len(sets) == k else 0.0
    return sets[0][0] - lightest


def _join_sets(first: _Set, second: _Set) -> _Set:
    large, small = (first, second) if len(first[2]) >= len(second[2]) else (second, first)
    large[2].extend(small[2])
    return (first[0] + second[0], min(first[1], second[1]), large[2])


def _join_solutions(first: list[_Set], second: list[_Set], k: int) -> list[_Set]:
    """Heaviest of one with lightest of the other; sets that meet an empty one stay as they are."""
    many, few = (first, second) if len(first) >= len(second) else (second, first)
    if len(few) == 1:
        single = _join_sets(many.pop(), few[0]) if len(many) == k else few[0]
        insort(many, single)
        return many
    alone = many[: k - len(few)] + few[: k - len(many)]
    pairs = zip(many[k - len(few) :], reversed(few), strict=False)  # what is left of `few` is in `alone`
    return sorted(alone + [_join_sets(heavy, light) for heavy, light in pairs])


_ALGORITHMS: dict[str, Callable[[NDArray[np.float64], int, bool], Groups]] = {
    "refined": refined,
    "karmarkar_karp": karmarkar_karp,
    "longest_first": longest_first,
    "sort_and_deal": sort_and_deal,
}
