"""Sequences that begin with the same tokens: each micro-batch computes these tokens once.

    groups of a mini-batch --whole, or divided where that is faster--> schedules (shared_search.py) --> the fastest

A whole group computes its beginning once. A part of a group computes it again, but parts fill micro-batches better and
fit under the cap. Parts that meet in one micro-batch share the beginning after all. Sequences of a group that share
more than its beginning are planned as branches (branches.py), too, and the faster of both plans is taken.

    workload of a group of lengths L_i, the first P tokens shared:    W(P) + sum_i (W(L_i) - W(P)),  W(L) = a L + b L^2
"""

from dataclasses import replace
from typing import Any

import numpy as np

from balancing.beginnings import Beginnings
from balancing.branches import Branches, branches
from balancing.dealing import Request, Schedule
from balancing.errors import CountError
from balancing.grouping import Floats, Grouping, Integers
from balancing.schedule import arranged, schedule_evenly
from balancing.shared_filling import Groups
from balancing.shared_search import fastest_of_groups

MOST_OWN = 16
"""A beginning is worth sharing by a sequence of up to this many times as many tokens of its own: merging its attention
costs about as much as 1 / MOST_OWN of these."""
NEAR_THE_LEAST = 1e-2
"""Other branches are not tried within this share of computing every token once, spread evenly."""


def fewest_worth_sharing(own: Any) -> Any:
    """The fewest shared tokens that pay for a sequence, or an array of them, with `own` tokens after them."""
    return -(-own // MOST_OWN)


def schedule_shared(sizes: Integers, weights: Floats, beginnings: Beginnings, request: Request) -> Schedule:
    """The fastest schedule found of groups, divided where that is faster; raises as `schedule_evenly` does.

    sizes: int64 [n], tokens. weights: float64 [n], each of a sequence alone, descending.
    """
    best, time = None, np.inf
    least, of_prompts = (_least(weights, each, request) for each in (beginnings, beginnings.of_groups))
    for each in branches(sizes, weights, beginnings, request, least):
        if time <= _least(each.weights, each.beginnings, request):  # as a rule: branches that meet share more
            break
        found = _of_branches(each, request)
        found_time = np.inf if found is None else found.time(beginnings.computed(weights, found.grouping.group_of))
        if found_time < time:
            best, time = found, found_time
        if time <= least * (1 + NEAR_THE_LEAST):
            break
    if best is not None and time <= of_prompts:  # single sequences would have to meet by chance
        return best
    alone = _of_groups(sizes, weights, beginnings.of_groups, request)
    if best is None or alone.time(beginnings.computed(weights, alone.grouping.group_of)) < time:
        return alone
    return best


def _least(weights: Floats, beginnings: Beginnings, request: Request) -> float:
    """The work of a rank if all sequences were in one micro-batch, spread evenly over the ranks."""
    return float(beginnings.computed(weights, np.zeros_like(beginnings.group)).sum()) / request.ranks


def _of_branches(kept: Branches, request: Request) -> Schedule | None:
    """That of branches; None if they are too few for the counts of `request`."""
    try:
        return kept.of_sequences(_of_groups(kept.sizes, kept.weights, kept.beginnings, request))
    except CountError:
        return None


def _of_groups(sizes: Integers, weights: Floats, beginnings: Beginnings, request: Request) -> Schedule:
    """That of sequences which share the beginnings of their groups alone."""
    groups, rows = in_groups(sizes, weights, beginnings)
    found = fastest_of_groups(groups, request)
    best, computed = None, weights
    if found is not None:
        best = replace(found, grouping=Grouping(_in_rows(found.grouping.group_of, rows), found.grouping.count))
        computed = beginnings.computed(weights, best.grouping.group_of)
    if best is None or float(weights.sum()) / request.ranks < best.time(computed):
        alone = schedule_evenly(sizes, weights, request)  # as if nothing were shared
        shared = beginnings.computed(weights, alone.grouping.group_of)
        if best is None or alone.time(shared) < best.time(computed):
            best, computed = alone, shared
    return arranged(best, computed, request.order)


def in_groups(sizes: Integers, weights: Floats, beginnings: Beginnings) -> tuple[Groups, Integers]:
    """The sequences in order of group, each group from the heaviest on, and this order, int64 [n].

    sizes: int64 [n], tokens. weights: float64 [n], each of a sequence alone. With `depths` a sequence counts what it
    does not share with the one before it: no plan computes less for any of a group's sequences in a micro-batch.
    """
    shared = beginnings if beginnings.depths is None else beginnings.depths
    own = weights - shared.workloads
    rows = np.lexsort((-own, beginnings.group))
    group = beginnings.group[rows]
    start = np.flatnonzero(np.diff(group, prepend=-1))
    first, ends = rows[start], np.append(start, len(rows))
    own_tokens = (sizes - shared.tokens)[rows]
    return Groups(own[rows], own_tokens, group, ends, beginnings.workloads[first], beginnings.tokens[first]), rows


def _in_rows(values: Integers, rows: Integers) -> Integers:
    """int64 [n]: `values`, one for each of `rows`, in the order of rows 0..n."""
    result = np.empty_like(values)
    result[rows] = values
    return result
