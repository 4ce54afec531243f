"""Iterated local search over small groups: two groups at a time are split optimally.

    heaviest + lighter group -> their members in two halves L, R -> all subsets of L and of R, by count, sorted
                             -> the union whose weight is nearest to half of the total (Horowitz and Sahni 1974)

Exchanges of one or two are few for small groups: eight and eight members have 849 exchanges, but 12,870 splits. If no
split makes the heaviest group lighter, a pseudo-random perturbation swaps some members, the search continues from
there, and the better result is kept.
"""

import numpy as np

from balancing.compiled import compiled
from balancing.grouping import Floats, Integers
from balancing.linked_lists import LinkedGroups, link, members_of, next_lightest, relink

MEMBERS = 20
"""Two groups are split only if they have at most this many members together: 2^10 subsets of each half."""
EFFORT = 5_000_000
"""The search ends after it has examined this many groups and subsets, about 50 ms of compiled code."""
PATIENCE = 60
"""The search ends after this many perturbations in a row without improvement."""


@compiled
def resplit_until_even(weights: Floats, group_of: Integers, count: int, equal_size: bool, level: float) -> Integers:
    """Make the heaviest of `count` groups as light as splits allow; ends at a load of `level`.

    weights: float64 [n], descending. group_of: int64 [n]. equal_size: two groups keep or swap their counts.
    Returns a new int64 [n].
    """
    groups = link(weights, weights, group_of, np.zeros(count))
    effort = _descend(groups, equal_size, level, EFFORT)
    best, lowest = groups.group_of.copy(), groups.loads.max()
    random, failures = 1, 0
    while lowest > level and effort > 0 and failures < PATIENCE:
        random = _perturb(groups, random)
        effort = _descend(groups, equal_size, level, effort - len(weights))
        heaviest = groups.loads.max()
        failures = 0 if heaviest < lowest else failures + 1
        if heaviest > lowest:
            groups = link(weights, weights, best, np.zeros(count))
        else:
            best, lowest = groups.group_of.copy(), heaviest
    return best


@compiled
def _descend(groups: LinkedGroups, equal_size: bool, level: float, effort: int) -> int:
    """Split the heaviest group with the lightest group that makes it lighter, repeatedly; returns the effort left."""
    loads, counts = groups.loads, groups.counts
    heavy, light = int(np.argmax(loads)), -1
    while loads[heavy] > level and effort > 0:
        light = next_lightest(loads, light)
        effort -= len(loads)
        if light < 0 or loads[light] >= loads[heavy]:
            break
        if counts[heavy] + counts[light] > MEMBERS or counts[heavy] < 2:
            continue
        effort -= 2 << ((counts[heavy] + counts[light] + 1) // 2)
        if _split(groups, heavy, light, equal_size):
            relink(groups, heavy, light)
            heavy, light = int(np.argmax(loads)), -1
    return effort


@compiled
def _perturb(groups: LinkedGroups, random: int) -> int:
    """Swap two random members of the heaviest group with any two sequences; returns the next random number.

    The generator is that of Park and Miller (1988), whose products fit in 64 bits.
    """
    for _ in range(2):
        heavy = int(np.argmax(groups.loads))
        members = members_of(groups, heavy)
        random = random * 16_807 % 2_147_483_647
        one = members[random % len(members)]
        random = random * 16_807 % 2_147_483_647
        other = random % len(groups.weights)
        light = int(groups.group_of[other])
        if light != heavy:
            groups.group_of[one], groups.group_of[other] = light, heavy
            relink(groups, heavy, light)
    return random


@compiled
def _split(groups: LinkedGroups, heavy: int, light: int, equal_size: bool) -> bool:
    """Give two groups the most even split of their members; returns whether the heavier becomes lighter."""
    members = np.concatenate((members_of(groups, heavy), members_of(groups, light)))
    left, right = members[::2].copy(), members[1::2].copy()
    half = (groups.loads[heavy] + groups.loads[light]) / 2
    left_sums, left_subsets, left_starts = _subsets(groups.weights[left], equal_size)
    right_sums, right_subsets, right_starts = _subsets(groups.weights[right], equal_size)
    nearest, best_left, best_right = (groups.loads[heavy] - half) * (1 - 1e-9), -1, -1
    wanted = groups.counts[heavy] if equal_size else 0
    for count in range(max(0, wanted - len(right_starts) + 2), min(wanted + 2, len(left_starts)) - 1):
        i, j = left_starts[count], right_starts[wanted - count + 1] - 1
        while i < left_starts[count + 1] and j >= right_starts[wanted - count]:
            above = left_sums[i] + right_sums[j] - half
            if abs(above) < nearest:
                nearest, best_left, best_right = abs(above), left_subsets[i], right_subsets[j]
            if above < 0:
                i += 1
            else:
                j -= 1
    if best_left < 0:
        return False
    for position in range(len(left)):
        groups.group_of[left[position]] = heavy if best_left >> position & 1 else light
    for position in range(len(right)):
        groups.group_of[right[position]] = heavy if best_right >> position & 1 else light
    return True


@compiled
def _subsets(weights: Floats, by_count: bool) -> tuple[Floats, Integers, Integers]:
    """All subsets of a few weights: their sums, ascending for each count, and their members as bits.

    Subsets of a count start at `starts[count]`; without `by_count` all subsets are listed as count 0.
    """
    sums, counts = np.zeros(1), np.zeros(1, np.int64)
    for weight in weights:
        sums, counts = np.concatenate((sums, sums + weight)), np.concatenate((counts, counts + 1))
    if not by_count:
        counts[:] = 0
    starts = np.zeros(len(weights) + 2 if by_count else 2, np.int64)
    for count in counts:
        starts[count + 1] += 1
    order = np.argsort(counts * (2 * weights.sum() + 1) + sums, kind="mergesort")
    return sums[order], order, np.cumsum(starts)
