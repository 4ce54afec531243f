"""The first move of a plan: Karmarkar-Karp twice, then mended until every cap holds.

    sequences -> ranks, by largest differencing -> each rank's micro-batches, by largest differencing
              -> what is above a cap moves to where there is room -> refinement (dealing.py, lowering.py)

Karmarkar-Karp knows no caps: it evens workload, whatever tokens a micro-batch then holds.
"""

import numpy as np
from numpy.typing import NDArray

from balancing.compiled import compiled
from balancing.differencing import largest_differencing
from balancing.grouping import Grouping
from balancing.partition import karmarkar_karp

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


def differenced(weights: Floats, ranks: int, steps: int) -> Grouping:
    """`steps` micro-batches for each of `ranks` ranks, as Karmarkar-Karp alone makes them; no cap is looked at.

    weights: float64 [n], descending. Micro-batch `step * ranks + rank` is that of a rank, each rank's heaviest first.
    Some are empty where a rank has fewer sequences than steps.
    """
    rank_of = karmarkar_karp(weights, ranks)
    return Grouping(among_micro_batches(weights, rank_of, ranks, steps), steps * ranks)


@compiled
def among_micro_batches(weights: Floats, rank_of: Integers, ranks: int, steps: int) -> Integers:
    """Each rank's sequences into `steps` sets by largest differencing; int64 [n], `step * ranks + rank` of each."""
    order, counts = np.argsort(rank_of, kind="mergesort"), np.bincount(rank_of, minlength=ranks)
    group_of, first = np.empty(len(weights), np.int64), 0
    for rank in range(ranks):
        rows = order[first : first + counts[rank]]
        first += counts[rank]
        if len(rows) <= steps:
            group_of[rows] = np.arange(len(rows)) * ranks + rank
            continue
        if steps == 1:
            group_of[rows] = rank
            continue
        set_of = largest_differencing(weights[rows], steps, False)
        loads = np.zeros(steps)
        for position in range(len(rows)):
            loads[set_of[position]] += weights[rows[position]]
        step_of = np.argsort(np.argsort(-loads, kind="mergesort"), kind="mergesort")
        group_of[rows] = step_of[set_of] * ranks + rank
    return group_of


@compiled
def mended(
    sizes: Integers, weights: Floats, group_of: Integers, count: int, max_tokens: int, max_sequences: int
) -> Integers:
    """Groups within the caps, none of them empty; int64 [n], -1 where a sequence found no room.

    sizes: int64 [n], tokens. weights: float64 [n], descending. group_of: int64 [n], in 0..count; n >= count.
    From a group above a cap go the shortest sequence that is enough, else the longest, over and over. They go, longest
    first, to the lightest group with room. An empty group gets the lightest sequence of the group that has most.
    """
    mended_of, tokens, counts = group_of.copy(), np.zeros(count, np.int64), np.bincount(group_of, minlength=count)
    loads = np.zeros(count)
    for sequence in range(len(sizes)):
        tokens[group_of[sequence]] += sizes[sequence]
        loads[group_of[sequence]] += weights[sequence]
    for group in range(count):
        if tokens[group] <= max_tokens and counts[group] <= max_sequences:
            continue
        members = np.flatnonzero(mended_of == group)
        while tokens[group] > max_tokens or counts[group] > max_sequences:
            leaving = _leaving(members, sizes, mended_of, tokens[group] - max_tokens)
            mended_of[leaving] = -1
            tokens[group] -= sizes[leaving]
            loads[group] -= weights[leaving]
            counts[group] -= 1
    loose = np.flatnonzero(mended_of < 0)
    for sequence in loose[np.argsort(-sizes[loose], kind="mergesort")]:
        lightest = -1
        for group in range(count):
            fits = tokens[group] + sizes[sequence] <= max_tokens and counts[group] < max_sequences
            if fits and (lightest < 0 or loads[group] < loads[lightest]):
                lightest = group
        if lightest < 0:
            return mended_of
        mended_of[sequence] = lightest
        tokens[lightest] += sizes[sequence]
        loads[lightest] += weights[sequence]
        counts[lightest] += 1
    for group in range(count):
        if counts[group] == 0:
            fullest = np.argmax(counts)
            sequence = np.flatnonzero(mended_of == fullest)[-1]
            mended_of[sequence] = group
            counts[fullest] -= 1
            counts[group] = 1
    return mended_of


@compiled
def _leaving(members: Integers, sizes: Integers, group_of: Integers, over: int) -> int:
    """Of the members that are left (group >= 0): the shortest of at least `over` tokens, else the longest."""
    chosen = -1
    for sequence in members:
        if group_of[sequence] < 0:
            continue
        if chosen < 0:
            chosen = sequence
        elif sizes[chosen] >= over:
            if over <= sizes[sequence] < sizes[chosen]:
                chosen = sequence
        elif sizes[sequence] > sizes[chosen]:
            chosen = sequence
    return int(chosen)
