"""Re-dealing (opt-in): whole groups move between mini-batches until all have equal workload.

    mini-batches of the caller -> groups: workload, sequences -> dealt evenly -> new mini-batches

It changes which sequences share an optimiser step, so that mini-batches are no longer a random draw. The global batch
stays the same, and the sequences of a group stay together.
"""

import numpy as np
from numpy.typing import ArrayLike

from balancing.errors import CountError
from balancing.exchange import Limits, even_out_arrays
from balancing.filling import fill_lightest
from balancing.grouping import Floats, Grouping, Integers
from balancing.partition import partition
from balancing.validation import group_names


def redealt(members: list[Integers], redeal_groups: ArrayLike, workloads: Floats) -> list[Integers]:
    """As many mini-batches of whole groups, with workloads as equal as possible.

    members: the caller's mini-batches, int64 indices of the n sequences. redeal_groups: n whole numbers >= 0, the group
    of each sequence. workloads: float64 [n]. A group that several mini-batches share is brought together.
    Numbers of sequences differ by no more than in `members`, or by no more than the size of the largest group.
    Returns int64 arrays with ascending indices.
    Raises LengthError unless there is one valid group for each sequence; CountError if groups are fewer than
    mini-batches.
    """
    groups = _group_numbers(redeal_groups, workloads)
    if groups.count < len(members):
        raise CountError(
            f"redeal_groups names {groups.count} groups for {len(members)} mini_batches; "
            "pass fewer mini_batches, or leave redeal_groups out"
        )
    loads, counts = groups.sums(workloads), groups.sizes()
    if (counts == counts[0]).all():
        dealt = Grouping.of(partition(loads, len(members), equal_size=True), groups.count)
    else:
        given = [len(rows) for rows in members]
        dealt = _deal_unequal(loads, counts, len(members), max(max(given) - min(given), int(counts.max())))
    return Grouping(dealt.group_of[groups.group_of], len(members)).members()


def _group_numbers(redeal_groups: ArrayLike, workloads: Floats) -> Grouping:
    """Groups renumbered 0..count."""
    names = group_names(redeal_groups, "redeal_groups", len(workloads))
    _, group_of = np.unique(names, return_inverse=True)
    count = int(group_of.max()) + 1
    return Grouping(group_of.astype(np.int64), count)


def _deal_unequal(loads: Floats, counts: Integers, mini_batches: int, spread: int) -> Grouping:
    """Deal groups of different sizes by workload if counts then differ by at most `spread`, else by count."""
    sequences = int(counts.sum())
    fair = -(-sequences // mini_batches)
    by_count = _longest_first(counts.astype(np.float64), counts, mini_batches, sequences)
    for start in (_longest_first(loads, counts, mini_batches, fair), by_count):
        if (start < 0).any():
            continue
        most = max(fair, int(np.bincount(start, counts, mini_batches).max()))
        evened = even_out_arrays(start, mini_batches, loads, counts, Limits(max_tokens=most))
        in_each = np.bincount(evened, counts, mini_batches)
        if in_each.max() - in_each.min() <= spread:
            return Grouping(evened, mini_batches)
    return Grouping(by_count, mini_batches)


def _longest_first(weights: Floats, counts: Integers, mini_batches: int, most: int) -> Integers:
    order = np.lexsort((-counts, -weights))
    return fill_lightest(order, counts, weights, mini_batches, most, len(counts))
