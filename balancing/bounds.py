"""How few micro-batches can do: bounds from below, and an exact search for small batches."""

import numpy as np
from numpy.typing import NDArray

EXACT_SEARCH_NODES = 20_000
"""Placements that the exact search tries before it gives up."""


def fewest_bins(sizes: NDArray[np.int64], capacity: int, max_items: int) -> int:
    """A lower bound on bins of `capacity` tokens and `max_items` items: the larger of ceil(n / max_items) and L2.

    sizes: int64 [n], each in 1..capacity.
    """
    return max(-(-len(sizes) // max_items), _martello_toth(sizes, capacity))


def _martello_toth(sizes: NDArray[np.int64], capacity: int) -> int:
    """The bound L2 of Martello and Toth (1990).

    For every threshold a <= capacity / 2: items above capacity - a are alone, items above half the capacity are in
    different bins, and items of at least a must share what the latter leave. Threshold 0 gives L1 = ceil(sum/capacity).
    """
    ascending = np.sort(sizes)
    total_before = np.concatenate([[0], np.cumsum(ascending)])
    half = int(np.searchsorted(ascending, capacity // 2, side="right"))  # items above half start here
    thresholds = np.concatenate([[0], np.unique(ascending[:half])])
    alone_start = np.maximum(np.searchsorted(ascending, capacity - thresholds, side="right"), half)
    large = alone_start - half
    large_sum = total_before[alone_start] - total_before[half]
    small_start = np.searchsorted(ascending, thresholds, side="left")
    small_sum = total_before[half] - total_before[small_start]
    overflow = np.maximum(0, -(-(small_sum - (large * capacity - large_sum)) // capacity))
    return int((len(sizes) - half + overflow).max())


def pack_exactly(sizes: NDArray[np.int64], bins: int, capacity: int, max_items: int) -> list[list[int]] | None:
    """Depth-first search for a packing into `bins`; None if there is none, or none was found within the node budget.

    Largest first; bins with equal room and count are tried once; a branch ends when the waste exceeds the spare room.
    """
    order = np.argsort(-sizes, kind="stable").tolist()
    items = [int(sizes[index]) for index in order]
    remaining = [sum(items[depth:]) for depth in range(len(items) + 1)]
    room, counts = [capacity] * bins, [0] * bins
    groups: list[list[int]] = [[] for _ in range(bins)]
    nodes = EXACT_SEARCH_NODES

    def place(depth: int) -> bool:
        nonlocal nodes
        if depth == len(items):
            return True
        size = items[depth]
        if sum(free for free, count in zip(room, counts, strict=True) if count < max_items) < remaining[depth]:
            return False
        tried: set[tuple[int, int]] = set()
        for position in sorted(range(bins), key=lambda b: room[b]):
            state = (room[position], counts[position])
            if room[position] < size or counts[position] == max_items or state in tried:
                continue
            tried.add(state)
            nodes -= 1
            if nodes < 0:
                return False
            room[position] -= size
            counts[position] += 1
            groups[position].append(order[depth])
            if place(depth + 1):
                return True
            room[position] += size
            counts[position] -= 1
            groups[position].pop()
        return False

    return groups if place(0) else None
