"""Micro-steps of unequal weight: sequences dealt to the times that a pipeline wants.

    sequences, heaviest first --+--> layers of `ranks` neighbours, one for each rank
                                |      --> each to the micro-step with most room left below its time, under the caps
                                +--> each to the micro-batch with most room left below the time of its step, likewise
      --> exchanges within each step (exchange.py)

In layers, neighbours differ least, so that the ranks of a step stay even, also under tight caps; light layers come
last, to fill what is left. One by one, short sequences fill what is left of a micro-step beside few long ones.
"""

import heapq
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from balancing.compiled import compiled
from balancing.dealing import Request, Schedule
from balancing.exchange import Limits, even_out_arrays
from balancing.grouping import Floats, Grouping, Integers

NOWHERE = -1
EVEN = 2e-4
"""The ranks of a step are even if the heaviest is within this share of their mean."""
EFFORT = 300_000
"""Limit of the exchanges within a step, about 2 ms of compiled code; see `exchange.even_out_arrays`."""

TRIES = 50_000
"""Limit of micro-batches that are found full when sequences are dealt one by one, about 10 ms of compiled code."""


def deal_to_times(sizes: Integers, weights: Floats, request: Request, times: Floats) -> Iterator[Schedule]:
    """Schedules whose steps take about `times`, ranks not yet even; none if caps or too few sequences forbid it.

    sizes: int64 [n], tokens. weights: float64 [n]. Both in descending order of weight. times: float64 [steps].
    """
    steps, caps = len(times), request.caps
    if caps.padded or len(sizes) < steps * request.ranks:
        return
    for deal in (_deal_layers, _deal_singly):
        group_of = deal(sizes, weights, request.ranks, times, caps.max_tokens, caps.max_sequences)
        if (group_of != NOWHERE).all():
            yield Schedule(Grouping(group_of, steps * request.ranks), steps, "pipeline_shape")


def likely_times(dealt: Schedule, weights: Floats) -> Floats:
    """float64 [steps]: the time of each step once its ranks are even: their mean, or a sequence heavier than that."""
    heaviest = np.zeros(dealt.steps)
    ranks = dealt.grouping.count // dealt.steps
    np.maximum.at(heaviest, dealt.grouping.group_of // ranks, weights)
    likely: Floats = np.maximum(dealt.loads(weights).mean(axis=1), heaviest)
    return likely


def even_out_steps(dealt: Schedule, sizes: Integers, weights: Floats, request: Request) -> Schedule:
    """Exchanges between the ranks of each step."""
    group_of, limits = dealt.grouping.group_of.copy(), Limits(request.caps.max_tokens, request.caps.max_sequences)
    for step, mean in enumerate(dealt.loads(weights).mean(axis=1).tolist()):
        rows = np.flatnonzero(group_of // request.ranks == step)
        ranks = group_of[rows] - step * request.ranks
        even = even_out_arrays(
            ranks, request.ranks, weights[rows], sizes[rows], limits,
            only_heaviest=True, target=mean * (1 + EVEN), effort=EFFORT,
        )  # fmt: skip
        group_of[rows] = even + step * request.ranks
    return replace(dealt, grouping=Grouping(group_of, dealt.grouping.count))


@compiled
def _deal_layers(
    sizes: Integers, weights: Floats, ranks: int, times: Floats, max_tokens: int, max_sequences: int
) -> Integers:
    """int64 [n]: the micro-batch of each sequence, NOWHERE from the first layer that does not fit."""
    steps, full = len(times), len(sizes) // ranks
    tokens, loads = np.zeros((steps, ranks), np.int64), np.zeros((steps, ranks))
    layers, room, empty = np.zeros(steps, np.int64), times.copy(), steps
    group_of = np.full(len(sizes), NOWHERE, np.int64)
    for layer in range(-(-len(sizes) // ranks)):
        first, stop = layer * ranks, min(len(sizes), (layer + 1) * ranks)
        placed = False
        for step in np.argsort(-room):
            # No step may stay empty: the last full layers go to those that have none.
            if layers[step] == max_sequences or (layer < full and full - layer == empty and layers[step] > 0):
                continue
            receivers = np.argsort(loads[step])[: stop - first]
            after = tokens[step][receivers] + sizes[first:stop]
            if (after > max_tokens).any():
                continue
            placed = True
            for place in range(stop - first):
                rank = receivers[place]
                tokens[step, rank] += sizes[first + place]
                loads[step, rank] += weights[first + place]
                group_of[first + place] = step * ranks + rank
            empty -= 1 if layers[step] == 0 else 0
            layers[step] += 1
            room[step] -= weights[first:stop].sum() / ranks
            break
        if not placed:
            break
    return group_of


@compiled
def _deal_singly(
    sizes: Integers, weights: Floats, ranks: int, times: Floats, max_tokens: int, max_sequences: int
) -> Integers:
    """int64 [n]: the micro-batch of each sequence, NOWHERE from the first that does not fit, or at the limit."""
    count, smallest, tries = len(times) * ranks, sizes.min(), TRIES
    tokens, members, empty = np.zeros(count, np.int64), np.zeros(count, np.int64), count
    group_of = np.full(len(sizes), NOWHERE, np.int64)
    heap = [(-times[group // ranks], group) for group in range(count)]  # (load - time, micro-batch) of those with room
    heapq.heapify(heap)
    passed = heap[:0]
    for sequence in range(len(sizes)):
        if len(sizes) - sequence == empty:  # the last sequences go to micro-batches that have none
            heap = [(excess, group) for excess, group in heap if members[group] == 0]
            heapq.heapify(heap)
        while len(heap) > 0:
            excess, group = heapq.heappop(heap)
            if tokens[group] + sizes[sequence] > max_tokens:
                passed.append((excess, group))
                tries -= 1
                if tries < 0:
                    return group_of
                continue
            group_of[sequence] = group
            tokens[group] += sizes[sequence]
            empty -= 1 if members[group] == 0 else 0
            members[group] += 1
            if members[group] < max_sequences and tokens[group] + smallest <= max_tokens:
                heapq.heappush(heap, (excess + weights[sequence], group))
            break
        if group_of[sequence] == NOWHERE:
            break
        while len(passed) > 0:
            heapq.heappush(heap, passed.pop())
    return group_of
