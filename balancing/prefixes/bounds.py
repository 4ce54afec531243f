"""Compute the lower bounds of `balancing.search.lower_bounds` for sequences that share prefixes.

fewest_parts             micro-batches of each group
prefix_step_time_bound   time of a mini-batch, with every prefix in each part that the caps force
"""

import numpy as np

from balancing.basics.grouping import Floats, Integers
from balancing.prefixes.groups import Groups
from balancing.search.lower_bounds import (
    MOST_TOGETHER,
    StepTimeBound,
    minimum_step_times,
    most_workload,
    prolonged,
)


def fewest_parts(groups: Groups, max_tokens: int, max_sequences: int) -> Integers:
    """Return the fewest micro-batches k_g >= 1 that any plan needs for each group, int64 [G].

    A micro-batch has room for `max_tokens` less the prefix. So k_g is at least own tokens / room and members
    / max_sequences, rounded up, and the number of members above half the room, no two of which fit together.
    """
    members = np.diff(groups.start)
    room = max_tokens - groups.shared_tokens
    tokens = np.add.reduceat(groups.own_tokens, groups.start[:-1])
    large = np.add.reduceat(
        2 * groups.own_tokens > room[groups.group], groups.start[:-1], dtype=np.int64
    )
    parts: Integers = np.maximum.reduce(
        [-(-tokens // room), -(-members // max_sequences), large]
    )
    return parts


def prefix_step_time_bound(
    groups: Groups, ranks: int, steps: int, max_tokens: int, max_sequences: int
) -> StepTimeBound:
    """Bound the time of sequences that share prefixes, by the formula of `step_time_bound`.

    Every plan computes the own part of each sequence and at least k_g prefixes of each group, so
    micro-batches hold these items. W does not include what a plan computes beyond them.
    """
    parts = fewest_parts(groups, max_tokens, max_sequences)
    forced = prefix_step_times(groups, ranks, steps, max_tokens, max_sequences)
    tokens = np.concatenate([groups.own_tokens, np.repeat(groups.shared_tokens, parts)])
    work = np.concatenate([groups.own, np.repeat(groups.shared, parts)])
    held = most_workload(
        tokens[tokens > 0], work[tokens > 0], np.arange(len(forced) + 1) * ranks, max_tokens
    )
    return prolonged(forced, float(work.sum()), held, ranks)


def prefix_step_times(
    groups: Groups, ranks: int, steps: int, max_tokens: int, max_sequences: int
) -> Floats:
    """Apply `minimum_step_times` with prefixes: one sequence adds its prefix, several add at least their own
    parts.
    """
    alone = groups.own + groups.shared[groups.group]
    times = np.zeros(steps)
    for weights, together in ((alone, 1), (groups.own, MOST_TOGETHER)):
        found = minimum_step_times(
            groups.own_tokens, weights, ranks, steps, max_tokens, max_sequences, together
        )
        times[: len(found)] = np.maximum(times[: len(found)], found)
    return times[times > 0]
