"""Plan rank by rank with the algorithms of other systems, for comparison or by choice.

    global batch --deal--> ranks --cut--> each rank's micro-batches, independent of other ranks

                   deal over ranks                 cut into micro-batches
    verl           Karmarkar-Karp, equal counts    Karmarkar-Karp, as many as tokens / cap on the fullest rank
    mindspeed_rl   longest first, to the lightest  the same
    roll           sorted, dealt with stride       in that order, as many rows as fit, padded to the longest

`published_steps` is each algorithm as published: mini-batches follow from the deal, and micro-batches may
exceed the cap. `schedule_rank_locally` keeps the caller's mini-batches and every cap.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from balancing.basics.grouping import Caps, Floats, Grouping, Integers
from balancing.basics.validation import (
    check_fits,
    membership,
    one_of,
    positive_integer,
    sequence_lengths,
    weight_array,
)
from balancing.search.assignment import Request, Schedule, checked_steps
from balancing.search.packing import heaviest_first, keeps_caps, spread
from balancing.search.padded import split_most_tokens, take_in_order
from balancing.search.partition import partition
from balancing.search.schedule import side_by_side

Published = Literal["verl", "roll", "mindspeed_rl"]
PUBLISHED: tuple[Published, ...] = ("verl", "roll", "mindspeed_rl")
PADDED: frozenset[str] = frozenset({"roll"})
"""Algorithms whose published form computes padded rows."""

Steps = list[list[Integers]]
"""steps[s][r]: int64, the sequences of rank r in micro-step s of a mini-batch."""


def published_steps(
    name: Published,
    lengths: ArrayLike,
    *,
    ranks: int,
    mini_batches: Sequence[ArrayLike] | None,
    max_tokens: int,
    workloads: ArrayLike,
) -> list[Steps]:
    """Return each mini-batch's micro-steps as the system `name` would plan them. They may exceed the cap.

    mini_batches: only their number counts. workloads: n numbers >= 0. A rank runs its heaviest micro-batch
    first. Raises as `plan_batch`.
    """
    one_of(name, "name", PUBLISHED)
    tokens = sequence_lengths(lengths)
    check_fits(tokens, tokens, positive_integer(max_tokens, "max_tokens"))
    costs = weight_array(workloads, "workloads", len(tokens))
    count = len(membership(mini_batches, len(tokens)))
    dealt = _DEALS[name](tokens, positive_integer(ranks, "ranks"))
    parts = [list(np.array_split(rows, count)) for rows in dealt]
    together = [list(rows) for rows in zip(*parts, strict=True)]
    if name == "roll":
        return [
            _cut_sorted(rows, tokens, max_tokens)
            for rows in together
            if any(map(len, rows))
        ]
    return [
        _cut_by_differencing(rows, tokens, costs, max_tokens)
        for rows in together
        if any(map(len, rows))
    ]


def schedule_rank_locally(
    name: Published, lengths: Integers, sizes: Integers, weights: Floats, request: Request
) -> Schedule:
    """Schedule one mini-batch, dealt and cut as the system `name` does, under the constraints of `request`.

    lengths, sizes: int64 [n], real tokens, which are dealt, and aligned ones. Raises as `schedule_evenly`.
    """
    ranks = _DEALS[name](lengths, request.ranks)
    cut = _CUTS[name]
    local = [cut(sizes[rows], request.caps, 1) for rows in ranks]
    fewest_on_a_rank = min(len(rows) for rows in ranks)
    steps = checked_steps(
        max(grouping.count for grouping in local), fewest_on_a_rank, len(sizes), request
    )
    runs = []
    for rows, grouping in zip(ranks, local, strict=True):
        count = min(steps, len(rows))
        local_grouping = cut(sizes[rows], request.caps, count) if count else grouping
        # As many sets may exceed a cap, so halve the fewer ones.
        if local_grouping.count != count:
            local_grouping = spread(grouping, sizes[rows], count)
        ordered = heaviest_first(local_grouping, sizes[rows], weights[rows], rows)
        runs.append([rows[inside] for inside in ordered.members()])
    return side_by_side(runs, steps, len(sizes), name)


def _deal_by_differencing(tokens: Integers, ranks: int) -> list[Integers]:
    return partition(
        tokens, ranks, equal_size=True, algorithm="karmarkar_karp", allow_empty=True
    )


def _deal_longest_first(tokens: Integers, ranks: int) -> list[Integers]:
    return partition(tokens, ranks, algorithm="longest_first", allow_empty=True)


def _deal_sorted(tokens: Integers, ranks: int) -> list[Integers]:
    order = np.argsort(tokens, kind="stable")
    return [order[rank::ranks] for rank in range(ranks)]


def _cut_by_differencing(
    rows: list[Integers], tokens: Integers, costs: Floats, max_tokens: int
) -> Steps:
    """Cut as published: ceil(tokens / cap) sets of the fullest rank, on all ranks. The sets may exceed the
    cap.
    """
    count = max(-(-int(tokens[mine].sum()) // max_tokens) for mine in rows)
    columns = []
    for mine in rows:
        sets = []
        if len(mine):
            places = partition(
                tokens[mine], count, algorithm="karmarkar_karp", allow_empty=True
            )
            sets = sorted(
                (mine[inside] for inside in places),
                key=lambda part: -float(costs[part].sum()),
            )
        columns.append(sets + [mine[:0]] * (count - len(sets)))
    return [list(step) for step in zip(*columns, strict=True)]


def _cut_sorted(rows: list[Integers], tokens: Integers, max_tokens: int) -> Steps:
    """Cut as published: all ranks share the cuts, which follow from the longest row at each position."""
    together = np.concatenate(rows)
    together = together[np.lexsort((together, tokens[together]))]
    columns = [together[rank :: len(rows)] for rank in range(len(rows))]
    sequences = len(together)
    longest = np.minimum(np.arange(len(columns[0])) * len(rows) + len(rows), sequences) - 1
    runs = take_in_order(tokens[together[longest]], max_tokens, sequences, padded=True)
    steps = []
    for start, stop in runs:
        steps.append([column[start:stop] for column in columns])
    return steps


def _keeps_caps(grouping: Grouping, sizes: Integers, caps: Caps) -> bool:
    return all(
        keeps_caps(sizes[inside], caps) for inside in grouping.members() if len(inside)
    )


def _differencing_under_caps(sizes: Integers, caps: Caps, at_least: int) -> Grouping:
    lowest = max(
        at_least,
        -(-int(sizes.sum()) // caps.max_tokens),
        -(-len(sizes) // caps.max_sequences),
    )
    for count in range(lowest, len(sizes)):
        sets = partition(sizes, count, algorithm="karmarkar_karp")
        grouping = Grouping.of(sets, len(sizes))
        if _keeps_caps(grouping, sizes, caps):
            return grouping
    return Grouping(np.arange(len(sizes)), len(sizes))


def _in_order_under_caps(sizes: Integers, caps: Caps, at_least: int) -> Grouping:
    runs = (
        take_in_order(sizes, caps.max_tokens, caps.max_sequences, padded=caps.padded)
        if len(sizes)
        else []
    )
    runs = (
        split_most_tokens(runs, sizes, at_least, padded=caps.padded)
        if len(runs) < at_least <= len(sizes)
        else runs
    )
    return Grouping.of([np.arange(start, stop) for start, stop in runs], len(sizes))


_DEALS: dict[str, Callable[[Integers, int], list[Integers]]] = {
    "verl": _deal_by_differencing,
    "roll": _deal_sorted,
    "mindspeed_rl": _deal_longest_first,
}
_CUTS: dict[str, Callable[[Integers, Caps, int], Grouping]] = {
    "verl": _differencing_under_caps,
    "roll": _in_order_under_caps,
    "mindspeed_rl": _differencing_under_caps,
}
