"""The best partition into sets of equal count, for few weights: an exact search that knows when it gave up."""

import numpy as np
from numpy.typing import NDArray

from balancing.compiled import compiled

NODES = 10_000_000
"""Placements that are tried before giving up, some tenths of a second of compiled code."""


def optimum(weights: NDArray[np.int64], k: int, reached: int) -> int | None:
    """The least heaviest set of k sets of n / k weights; None where the search gives up.

    weights: int64 [n], whole numbers; k divides n. reached: what some partition has.
    """
    descending = np.sort(weights)[::-1].copy()
    best, finished = _search(descending, k, reached, NODES)
    return int(best) if finished else None


@compiled
def _search(weights: NDArray[np.int64], k: int, reached: int, nodes: int) -> tuple[int, bool]:
    """Depth first, heaviest weight first; sets of equal weight and count are tried once.

    A set must stay below the best known with the lightest weights that are left, and must be able to reach what the
    others leave at least to it with the heaviest that are left.
    """
    count, size, best = len(weights), len(weights) // k, reached
    fair = weights.sum() - (k - 1) * (best - 1)
    before = np.zeros(count + 1, np.int64)
    for depth in range(count):
        before[depth + 1] = before[depth] + weights[depth]
    loads, counts, place = np.zeros(k, np.int64), np.zeros(k, np.int64), np.full(count, -1)
    depth = 0
    while depth >= 0:
        if depth == count:
            best = loads.max()
            fair = weights.sum() - (k - 1) * (best - 1)
            depth -= 1
            continue
        current, weight = place[depth], weights[depth]
        if current >= 0:
            loads[current] -= weight
            counts[current] -= 1
        chosen = -1
        for part in range(current + 1, k):
            left = size - counts[part] - 1
            if left < 0 or loads[part] + weight + before[count] - before[count - left] >= best:
                continue
            if loads[part] + weight + before[depth + 1 + left] - before[depth + 1] < fair:
                continue
            twin = False
            for other in range(part):
                twin = twin or (loads[other] == loads[part] and counts[other] == counts[part])
            if not twin:
                chosen = part
                break
        place[depth] = chosen
        nodes -= 1
        if nodes == 0:
            return best, False
        if chosen < 0:
            depth -= 1
        else:
            loads[chosen] += weight
            counts[chosen] += 1
            depth += 1
            if depth < count:
                place[depth] = -1
    return best, True
