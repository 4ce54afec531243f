"""Karmarkar-Karp in plain Python, twice: what the compiled one is measured against.

`with_objects` is the form that training systems ship: a class for a set, one for a partial solution of k sets, heapq,
and all k sets sorted anew at every join. `with_tuples` is the leanest plain Python that we could write.
Both start from runs of k weights for equal counts, otherwise from single weights with k - 1 empty sets.
"""

import heapq
from collections.abc import Sequence


class _Set:
    def __init__(self) -> None:
        self.total = 0
        self.items: list[tuple[int, int]] = []

    def add(self, index: int, weight: int) -> None:
        self.items.append((index, weight))
        self.total += weight

    def join(self, other: "_Set") -> None:
        for index, weight in other.items:
            self.add(index, weight)

    def __lt__(self, other: "_Set") -> bool:
        return (self.total, len(self.items)) < (other.total, len(other.items))


class _Solution:
    def __init__(self, weights: Sequence[int], indices: Sequence[int], k: int) -> None:
        self.difference = weights[indices[0]] - (weights[indices[-1]] if len(indices) == k else 0)
        self._weights, self._indices, self._k = weights, indices, k
        self.sets: list[_Set] = []

    def expand(self) -> "_Solution":
        """Make the k sets; done when the solution is first joined, so that n * k sets need not be held at once."""
        if not self.sets:
            self.sets = [_Set() for _ in range(self._k)]
            for part, index in zip(self.sets, self._indices, strict=False):
                part.add(index, self._weights[index])
        return self

    def join(self, other: "_Solution") -> None:
        for one, another in zip(self.sets, reversed(other.sets), strict=True):
            one.join(another)
        self.sets.sort(reverse=True)
        self.difference = self.sets[0].total - self.sets[-1].total

    def __lt__(self, other: "_Solution") -> bool:
        return self.difference > other.difference


def with_objects(weights: Sequence[int], k: int, equal_size: bool) -> list[list[int]]:
    """k index lists, ascending."""
    heap = [_Solution(weights, indices, k) for indices in _first_solutions(weights, k, equal_size)]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap).expand(), heapq.heappop(heap).expand()
        first.join(second)
        heapq.heappush(heap, first)
    return [sorted(index for index, _ in part.items) for part in heap[0].expand().sets]


def with_tuples(weights: Sequence[int], k: int, equal_size: bool) -> list[list[int]]:
    """The same, a set being (sum, indices)."""
    empty: tuple[int, list[int]] = (0, [])
    heap = []
    for number, indices in enumerate(_first_solutions(weights, k, equal_size)):
        sets = [(weights[index], [index]) for index in indices] + [empty] * (k - len(indices))
        heap.append((sets[-1][0] - sets[0][0], number, sets))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        joined.sort(reverse=True)
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return [sorted(indices) for _, indices in heap[0][2]]


def _first_solutions(weights: Sequence[int], k: int, equal_size: bool) -> list[list[int]]:
    order = sorted(range(len(weights)), key=lambda index: -weights[index])
    step = k if equal_size else 1
    return [order[start : start + step] for start in range(0, len(order), step)]
