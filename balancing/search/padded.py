"""Form contiguous runs of sequences: the padded layout, and any layout in the given order."""

import heapq
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from balancing.basics.compiled import compiled
from balancing.basics.grouping import Floats, Grouping, Integers

Runs = list[tuple[int, int]]
"""Consecutive half-open ranges of positions."""


def take_in_order(
    sizes: Integers,
    max_tokens: int,
    max_sequences: int,
    *,
    padded: bool,
    weights: Floats | None = None,
    max_weight: float = np.inf,
) -> Runs:
    """Cut positions 0..n from the front into the longest runs that keep the caps, the fewest for this order.

    sizes: int64 [n], n >= 1, each at most `max_tokens`. A run takes their sum, or if `padded` rows times the
    largest.
    weights: float64 [n] or None. Several sequences in a run sum to at most `max_weight`.
    """
    loads = np.zeros(len(sizes)) if weights is None else weights
    starts = run_starts(
        sizes, loads, max_tokens, max_sequences, padded, max_weight
    ).tolist()
    return list(pairwise([*starts, len(sizes)]))


@compiled
def run_starts(
    sizes: Integers,
    loads: Floats,
    max_tokens: int,
    max_sequences: int,
    padded: bool,
    max_load: float,
) -> Integers:
    starts = np.zeros(len(sizes), np.int64)
    count, total, widest, load = 1, 0, 0, 0.0
    for position in range(len(sizes)):
        size = sizes[position]
        rows = position - starts[count - 1] + 1
        tokens = rows * max(widest, size) if padded else total + size
        if (
            tokens > max_tokens
            or rows > max_sequences
            or (rows > 1 and load + loads[position] > max_load)
        ):
            starts[count] = position
            count = count + 1
            total = 0
            widest = 0
            load = 0.0
        total = total + size
        widest = max(widest, size)
        load = load + loads[position]
    return starts[:count]


def equal_counts(positions: int, count: int) -> Runs:
    """Return `count` runs whose lengths differ by at most one, longer runs first."""
    least, longer = divmod(positions, count)
    bounds = [run * least + min(run, longer) for run in range(count + 1)]
    return list(pairwise(bounds))


def split_most_tokens(runs: Runs, sizes: Integers, count: int, *, padded: bool) -> Runs:
    """Halve the runs with most tokens until there are `count`, at most the number of positions."""

    def entry(start: int, stop: int) -> tuple[int, int, int]:
        inside = sizes[start:stop]
        tokens = (
            0
            if len(inside) < 2
            else int(len(inside) * inside.max() if padded else inside.sum())
        )
        return -tokens, start, stop

    heap = [entry(start, stop) for start, stop in runs]
    heapq.heapify(heap)
    while len(heap) < count:
        _, start, stop = heap[0]
        middle = (start + stop) // 2
        heapq.heapreplace(heap, entry(start, middle))
        heapq.heappush(heap, entry(middle, stop))
    return sorted((start, stop) for _, start, stop in heap)


def pack_padded(
    sizes: Integers,
    weights: Floats | None,
    max_tokens: int,
    max_sequences: int,
    allowed_count: Callable[[int, int], int],
) -> Grouping:
    """Form the fewest micro-batches of `rows * longest <= max_tokens`, with the heaviest as light as this
    count allows.

    Taking as many of the longest remaining sequences as fit minimises the count: any sequence that shares a
    micro-batch with the longest can be exchanged for the next longest, and no micro-batch grows.
    weights: None is padded tokens. allowed_count: (needed, sequences) -> count.
    """
    order = np.argsort(-sizes, kind="stable")
    descending = sizes[order]
    runs = take_in_order(descending, max_tokens, max_sequences, padded=True)
    count = allowed_count(len(runs), len(sizes))
    if weights is None:
        runs = _lowest_token_limit(descending, max_tokens, max_sequences, count)
    else:
        runs = _lowest_weight_limit(
            descending, weights[order], max_tokens, max_sequences, count
        )
    runs = split_most_tokens(runs, descending, count, padded=True)
    return Grouping.of([order[start:stop] for start, stop in runs], len(sizes))


def _lowest_token_limit(
    descending: Integers, max_tokens: int, max_sequences: int, count: int
) -> Runs:
    low = int(descending[0])
    high = max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(take_in_order(descending, middle, max_sequences, padded=True)) <= count:
            high = middle
        else:
            low = middle + 1
    return take_in_order(descending, high, max_sequences, padded=True)


def _lowest_weight_limit(
    descending: Integers, weights: Floats, max_tokens: int, max_sequences: int, count: int
) -> Runs:
    def runs_within(limit: float) -> Runs:
        return take_in_order(
            descending,
            max_tokens,
            max_sequences,
            padded=True,
            weights=weights,
            max_weight=limit,
        )

    low = 0.0
    high = float(weights.sum())
    for _ in range(20):
        middle = (low + high) / 2
        if len(runs_within(middle)) <= count:
            high = middle
        else:
            low = middle
    return runs_within(high)
