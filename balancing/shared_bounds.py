"""Lower bounds for sequences that share beginnings, each computed at least once by every micro-batch that has any.

    o_i: work of sequence i after its beginning     P_g: work of the beginning of group g     R: ranks

Every plan divides group g into some number of parts; if that is at least k_g, it computes at least

    W = sum_i o_i + sum_g k_g P_g

fewest_parts           k_g that the caps force
largest_rank_bound     the heaviest rank, whatever the number of micro-steps
shared_step_time_bound the time of a mini-batch in a given number of micro-steps
"""

import numpy as np

from balancing.grouping import Floats, Integers
from balancing.lower_bounds import (
    MOST_TOGETHER,
    StepTimeBound,
    minimum_step_times,
    most_workload,
    prolonged,
)
from balancing.packing import Caps
from balancing.shared_filling import Groups

BISECTIONS = 40
"""Iterations of the search for the least possible load."""


def fewest_parts(groups: Groups, caps: Caps) -> Integers:
    """int64 [G]: no plan has a group in fewer micro-batches, k_g >= 1.

    A micro-batch has room for `max_tokens` less the beginning. So k_g is at least own tokens / room and
    members / max_sequences, rounded up, and the number of members above half the room, no two of which fit together.
    """
    members = np.diff(groups.start)
    room = caps.max_tokens - groups.shared_tokens
    tokens = np.add.reduceat(groups.own_tokens, groups.start[:-1])
    large = np.add.reduceat(2 * groups.own_tokens > room[groups.group], groups.start[:-1], dtype=np.int64)
    parts: Integers = np.maximum.reduce([-(-tokens // room), -(-members // caps.max_sequences), large])
    return parts


def largest_rank_bound(groups: Groups, ranks: int, parts: Integers) -> float:
    """A lower bound on the workload of the heaviest rank, in the unit of `groups.own`.

    No rank is lighter than its heaviest sequence with its beginning. If no rank is heavier than T, each computes at
    most T - P_g of group g besides the beginning, so that the group is on at least ceil(own_g / (T - P_g)) ranks, which
    all compute the beginning. With the larger of this and `parts` for k_g, R T >= W. W falls as T grows, so that
    the least T for which this holds is a bound; bisection returns one for which it does not, or workload / ranks.
    """
    own = work_of_groups(groups)
    least = float(own.sum() + parts @ groups.shared) / ranks
    low = max(least, float((groups.own + groups.shared[groups.group]).max()))
    if _possible(low, own, groups.shared, parts, ranks):
        return low
    high = 2 * low
    while not _possible(high, own, groups.shared, parts, ranks):
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _possible(middle, own, groups.shared, parts, ranks) else (middle, high)
    return low


def work_of_groups(groups: Groups) -> Floats:
    """float64 [G]: the work of each group without its beginning."""
    own: Floats = np.add.reduceat(groups.own, groups.start[:-1])
    return own


def _possible(load: float, own: Floats, shared: Floats, parts: Integers, ranks: int) -> bool:
    """Whether ranks of at most `load` have room for W; rounding errors count as room."""
    room = np.maximum(load - shared, 0.0)
    needed = np.ceil(np.divide(own, room, out=np.full(len(own), np.inf), where=room > 0) * (1 - 1e-12))
    return bool(own.sum() + (np.maximum(needed, parts) * shared).sum() <= ranks * load * (1 + 1e-12))


def shared_step_time_bound(groups: Groups, ranks: int, steps: int, caps: Caps) -> StepTimeBound:
    """A lower bound on a mini-batch's time in `steps` micro-steps; `lower_bounds.step_time_bound` for what is shared.

    The larger of `largest_rank_bound` and of the maximum over j = 0..steps of

        v_1 + ... + v_j + (W - K_j) / R

    v_i: the least time of the i-th longest micro-step; the least tokens and workloads that sequences can add are their
    own, and one that is alone adds its beginning. K_j: the most of W that j * R micro-batches can hold. They hold parts
    of groups, each with its beginning, so the items to fill them with are own parts and k_g beginnings of each group.
    What a plan has beyond that is outside W.
    """
    parts = fewest_parts(groups, caps)
    rank = largest_rank_bound(groups, ranks, parts)
    forced = least_step_times(groups, ranks, steps, caps)
    tokens = np.concatenate([groups.own_tokens, np.repeat(groups.shared_tokens, parts)])
    work = np.concatenate([groups.own, np.repeat(groups.shared, parts)])
    held = most_workload(tokens[tokens > 0], work[tokens > 0], np.arange(len(forced) + 1) * ranks, caps.max_tokens)
    bound = prolonged(forced, float(work.sum()), held, ranks)
    return bound if bound.time > rank else StepTimeBound(rank, 0)


def least_step_times(groups: Groups, ranks: int, steps: int, caps: Caps) -> Floats:
    """v_1 >= v_2 >= ... > 0, at most `steps` values; see `lower_bounds.minimum_step_times`."""
    alone = groups.own + groups.shared[groups.group]
    times = np.zeros(steps)
    for weights, together in ((alone, 1), (groups.own, MOST_TOGETHER)):
        found = minimum_step_times(
            groups.own_tokens, weights, ranks, steps, caps.max_tokens, caps.max_sequences, together
        )
        times[: len(found)] = np.maximum(times[: len(found)], found)
    return times[times > 0]
