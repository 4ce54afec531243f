"""Micro-steps of unequal weight: sequences dealt to the times that a pipeline wants.

    sequences, heaviest first --> layers of `ranks` neighbours, one for each rank
      --> each to the micro-step with most room left below its time, under the caps
      --> exchanges within each step (exchange.py)

Neighbours differ least, so that the ranks of a step stay even; and light layers come last, to fill what is left.
"""

from dataclasses import replace

import numpy as np

from balancing.compiled import compiled
from balancing.dealing import Request, Schedule
from balancing.exchange import Limits, even_out_arrays
from balancing.grouping import Floats, Grouping, Integers

NOWHERE = -1
EVEN = 1e-3
"""The ranks of a step are even if the heaviest is within this share of their mean."""
EFFORT = 300_000
"""Limit of the exchanges within a step, about 2 ms of compiled code; see `exchange.even_out_arrays`."""


def deal_to_times(sizes: Integers, weights: Floats, request: Request, times: Floats) -> Schedule | None:
    """A schedule whose steps take about `times`, its ranks not yet even; None if caps or too few layers forbid it.

    sizes: int64 [n], tokens. weights: float64 [n]. Both in descending order of weight. times: float64 [steps].
    """
    steps, caps = len(times), request.caps
    if caps.padded or len(sizes) < steps * request.ranks:
        return None
    group_of = _deal_layers(sizes, weights, request.ranks, times, caps.max_tokens, caps.max_sequences)
    if (group_of == NOWHERE).any():
        return None
    return Schedule(Grouping(group_of, steps * request.ranks), steps, "pipeline_shape")


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
