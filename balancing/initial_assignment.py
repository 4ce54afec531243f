"""The first assignment of a mini-batch: Karmarkar-Karp over ranks and over each rank's micro-batches, then repair.

    sequences -> ranks -> micro-batches of each rank -> repair: sequences above a cap move to micro-batches with room

Karmarkar-Karp balances workload and knows no caps, so its micro-batches may exceed them until they are repaired.
"""

import numpy as np

from balancing.compiled import compiled
from balancing.differencing import largest_differencing
from balancing.filling import fill_to_level
from balancing.grouping import Floats, Grouping, Integers
from balancing.partition import karmarkar_karp


def karmarkar_karp_twice(weights: Floats, ranks: int, steps: int) -> Grouping:
    """`steps` micro-batches for each of `ranks` ranks by Karmarkar-Karp alone, without caps.

    weights: float64 [n], descending. Micro-batch `step * ranks + rank` belongs to that rank, its heaviest first.
    A rank with fewer sequences than steps has empty micro-batches.
    """
    rank_of = karmarkar_karp(weights, ranks)
    return Grouping(split_ranks(weights, rank_of, ranks, steps), steps * ranks)


@compiled
def split_ranks(weights: Floats, rank_of: Integers, ranks: int, steps: int) -> Integers:
    """Split each rank's sequences into `steps` sets; int64 [n], `step * ranks + rank` of each sequence."""
    group_of = np.empty(len(weights), np.int64)
    for rank in range(ranks):
        rows = np.flatnonzero(rank_of == rank)
        if steps == 1 or len(rows) <= steps:
            set_of = np.arange(len(rows)) % steps
        else:
            set_of = largest_differencing(weights[rows], steps, False)
        heaviest_first = np.argsort(-np.bincount(set_of, weights[rows], steps), kind="mergesort")
        group_of[rows] = np.argsort(heaviest_first, kind="mergesort")[set_of] * ranks + rank
    return group_of


@compiled
def repair_caps(
    sizes: Integers, weights: Floats, group_of: Integers, count: int, max_tokens: int, max_sequences: int
) -> Integers:
    """Groups within the caps, none of them empty; int64 [n], -1 for a sequence that fits nowhere.

    sizes: int64 [n], tokens. weights: float64 [n], descending. group_of: int64 [n], in 0..count; n >= count.
    Sequences taken out of groups above a cap go, longest first, to the lightest group with room. An empty group takes
    the lightest sequence of the group with most sequences.
    """
    kept = group_of.copy()
    tokens, counts = np.bincount(group_of, sizes, count), np.bincount(group_of, minlength=count)
    for group in range(count):
        if tokens[group] > max_tokens or counts[group] > max_sequences:
            _take_out_excess(kept, group, sizes, max_tokens, max_sequences)
    loose = np.flatnonzero(kept < 0)
    loose = loose[np.argsort(-sizes[loose], kind="mergesort")]
    repaired = fill_to_level(loose, sizes, weights, kept, count, np.inf, max_tokens, max_sequences)
    if (repaired < 0).any():
        return repaired
    counts = np.bincount(repaired, minlength=count)
    for group in np.flatnonzero(counts == 0):
        largest = np.argmax(counts)
        repaired[np.flatnonzero(repaired == largest)[-1]] = group
        counts[largest] -= 1
        counts[group] = 1
    return repaired


@compiled
def _take_out_excess(group_of: Integers, group: int, sizes: Integers, max_tokens: int, max_sequences: int) -> None:
    """Take out (-1) the shortest sequence that brings the group within its caps, else the longest, until it is."""
    members = np.flatnonzero(group_of == group)
    excess, count = sizes[members].sum() - max_tokens, len(members)
    while excess > 0 or count > max_sequences:
        leaving = -1
        for sequence in members:
            if group_of[sequence] < 0:
                continue
            if leaving < 0:
                better = True
            elif sizes[leaving] >= excess:
                better = excess <= sizes[sequence] < sizes[leaving]
            else:
                better = sizes[sequence] > sizes[leaving]
            if better:
                leaving = sequence
        group_of[leaving] = -1
        excess -= sizes[leaving]
        count -= 1
