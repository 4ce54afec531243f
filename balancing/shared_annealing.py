"""Simulated annealing (Kirkpatrick, Gelatt and Vecchi 1983) of groups over pairs of micro-batches.

    a pair, or the scattered groups --- item ---> another one
                                    <-- item, or nothing ---

Scattered groups are divided among many micro-batches later, to fill what pairs leave. The cost is, in units of a mean
level and with o_p the work by which pair p exceeds its levels and the cap,

    sum_p (o_p + EXCESS o_p^2) + max(0, own work of scattered groups - USED * what pairs have room for)

I items (shared_pairs.py), P pairs.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancing.compiled import compiled
from balancing.grouping import Floats, Integers
from balancing.shared_pairs import Items, Pair, best_cut

MOST_IN_PAIR = 6
"""A pair holds up to this many items."""
DRAWS = 4
"""Random numbers of an iteration."""
EXCESS = 300.0
HOT, COLD = 1e-2, 3e-4
"""Temperatures of the first and the last iteration."""
TO_SCATTERED = 0.05
"""This share of the moves goes from a pair to the scattered groups."""
USED = 0.95
"""Scattered groups use this share of the room in pairs, which their parts never fill exactly."""


class Pairs(NamedTuple):
    """first, second: float64 [P], levels of the micro-batches. max_tokens, price, least: as in `Pair`."""

    first: Floats
    second: Floats
    max_tokens: int
    price: float
    least: float


class State(NamedTuple):
    """pair_of: int64 [I], P for scattered items. held: int64 [P, MOST_IN_PAIR], items of a pair, `counts` of them.

    loads: float64 [P], work of these items. values: float64 [P], of the best cut. costs: float64 [P].
    """

    pair_of: Integers
    held: Integers
    counts: Integers
    loads: Floats
    values: Floats
    costs: Floats


@compiled
def anneal(items: Items, may_scatter: NDArray[np.bool_], pairs: Pairs, pair_of: Integers, draws: Floats) -> Integers:
    """int64 [I], the pair of each item, P for scattered ones: that of the lowest cost of all iterations.

    may_scatter: bool [I]. pair_of: int64 [I], to begin with, 0..P - 1, at most MOST_IN_PAIR each. draws: float64
    [iterations, DRAWS], evenly distributed in [0, 1).
    """
    count, unit = len(pairs.first), (pairs.first.sum() + pairs.second.sum()) / (2 * len(pairs.first))
    state = _begin(items, pairs, pair_of, unit)
    over, room, scattered = state.costs.sum(), np.maximum(state.values, 0.0).sum(), 0.0
    cost, lowest, best_of = over, over, pair_of.copy()
    source_held, target_held = np.empty(MOST_IN_PAIR, np.int64), np.empty(MOST_IN_PAIR, np.int64)
    temperature, cooling = HOT, (COLD / HOT) ** (1 / max(len(draws), 1))
    for iteration in range(len(draws)):
        temperature *= cooling
        item, target, back = _move(state, may_scatter, draws, iteration)
        source = state.pair_of[item]
        if target < 0 or source == target:
            continue
        accepted = cost - temperature * np.log(1 - draws[iteration, 3])  # a cost below this is, as by Metropolis (1953)
        new_over, new_room, new_scattered = over, room, scattered
        for pair, leaves, enters in ((source, item, back), (target, back, item)):
            if pair == count:
                new_scattered += _own(items, enters) - _own(items, leaves)
                continue
            free = pairs.first[pair] + pairs.second[pair] - state.loads[pair] + _freed(items, leaves, enters)
            new_over += _cost(free, unit) - state.costs[pair]
            new_room += max(0.0, free) - max(0.0, state.values[pair])
        if new_over + max(0.0, new_scattered - USED * new_room) / unit >= accepted:
            continue  # however these pairs are cut: the fate of most moves
        source_value = _value(items, pairs, state, source, item, back, source_held)
        target_value = _value(items, pairs, state, target, back, item, target_held)
        new_over, new_room = over, room
        for pair, value in ((source, source_value), (target, target_value)):
            if pair < count:
                new_over += _cost(value, unit) - state.costs[pair]
                new_room += max(0.0, value) - max(0.0, state.values[pair])
        new_cost = new_over + max(0.0, new_scattered - USED * new_room) / unit
        if new_cost >= accepted:
            continue
        _set(items, state, source, item, back, source_held, source_value, unit)
        _set(items, state, target, back, item, target_held, target_value, unit)
        over, room, scattered, cost = new_over, new_room, new_scattered, new_cost
        if cost < lowest:
            lowest = cost
            best_of[:] = state.pair_of
    return best_of


@compiled
def _begin(items: Items, pairs: Pairs, pair_of: Integers, unit: float) -> State:
    count = len(pairs.first)
    held, counts = np.full((count, MOST_IN_PAIR), -1), np.zeros(count, np.int64)
    state = State(pair_of.copy(), held, counts, np.zeros(count), np.zeros(count), np.zeros(count))
    for item in range(len(pair_of)):
        pair = pair_of[item]
        held[pair, counts[pair]] = item
        counts[pair] += 1
        state.loads[pair] += items.work[item]
    for pair in range(count):
        state.values[pair] = best_cut(items, held[pair], counts[pair], pair_at(pairs, pair)).value
        state.costs[pair] = _cost(state.values[pair], unit)
    return state


@compiled
def _move(state: State, may_scatter: NDArray[np.bool_], draws: Floats, iteration: int) -> tuple[int, int, int]:
    """An item, its target (-1 for no move) and the item that comes back, -1 for none."""
    count = len(state.counts)
    item = int(draws[iteration, 0] * len(state.pair_of))
    if draws[iteration, 1] < TO_SCATTERED:
        return item, count if may_scatter[item] else -1, -1
    target = int((draws[iteration, 1] - TO_SCATTERED) / (1 - TO_SCATTERED) * count)
    place = int(draws[iteration, 2] * (state.counts[target] + 1)) - 1
    if place < 0:
        return item, -1 if state.counts[target] == MOST_IN_PAIR else target, -1
    back = state.held[target, place]
    if state.pair_of[item] == count and not may_scatter[back]:
        return item, -1, -1
    return item, target, back


@compiled
def pair_at(pairs: Pairs, pair: int) -> Pair:
    """The levels and limits of one pair."""
    return Pair(pairs.first[pair], pairs.second[pair], pairs.max_tokens, pairs.price, pairs.least)


@compiled
def _cost(value: float, unit: float) -> float:
    over = max(0.0, -value) / unit
    return over + EXCESS * over * over


@compiled
def _own(items: Items, item: int) -> float:
    return items.work[item] - items.shared[item] if item >= 0 else 0.0


@compiled
def _freed(items: Items, leaves: int, enters: int) -> float:
    """By how much there is more room in a pair."""
    return (items.work[leaves] if leaves >= 0 else 0.0) - (items.work[enters] if enters >= 0 else 0.0)


@compiled
def _value(items: Items, pairs: Pairs, state: State, pair: int, leaves: int, enters: int, held: Integers) -> float:
    """The value of a pair after a move; writes its items into `held`. 0 for the scattered items."""
    if pair == len(state.counts):
        return 0.0
    count = 0
    for place in range(state.counts[pair]):
        if state.held[pair, place] != leaves:
            held[count] = state.held[pair, place]
            count += 1
    if enters >= 0:
        held[count] = enters
        count += 1
    return best_cut(items, held, count, pair_at(pairs, pair)).value


@compiled
def _set(
    items: Items, state: State, pair: int, leaves: int, enters: int, held: Integers, value: float, unit: float
) -> None:
    if enters >= 0:
        state.pair_of[enters] = pair
    if pair == len(state.counts):
        return
    state.counts[pair] += int(enters >= 0) - int(leaves >= 0)
    state.held[pair] = held
    state.loads[pair] -= _freed(items, leaves, enters)
    state.values[pair], state.costs[pair] = value, _cost(value, unit)
