"""The best way to hold whole groups in two micro-batches, of which at most two groups are divided.

first micro-batch     A A A A A A | C C C        only C's beginning is computed twice
second micro-batch    B B B | C C C C C |        what is left may be filled with parts of other groups
"""

from typing import NamedTuple

from balancing.compiled import compiled
from balancing.grouping import Floats, Integers

LEAST_SHARE = 0.03
"""A divided group has at least this share of its own work in each micro-batch."""


class Items(NamedTuple):
    """Groups, or parts of a group that is too large for a pair of micro-batches. I of them.

    work: float64 [I], tokens: int64 [I], beginning included. shared, shared_tokens: of the beginning.
    """

    work: Floats
    tokens: Integers
    shared: Floats
    shared_tokens: Integers


class Pair(NamedTuple):
    """first, second: the most work of each micro-batch. max_tokens: the cap of both.

    Of what is left in one, a part of another group wastes `price`, about its beginning; its own work is above `least`.
    """

    first: float
    second: float
    max_tokens: int
    price: float
    least: float


class Cut(NamedTuple):
    """How a pair holds its items.

    value: own work of parts of other groups for which there is room; or negative, the work above levels and cap.
    first: a bit for each item that is whole in the first micro-batch. one, other: places of divided items, -1 for none.
    share: of the own work of these, what is in the first micro-batch.
    """

    value: float
    first: int
    one: int
    other: int
    share: float


@compiled
def best_cut(items: Items, held: Integers, count: int, pair: Pair) -> Cut:
    """The cut of the highest value, of all that fill the first micro-batch with the divided items as far as they go.

    held: int64, indices of items; the pair has the first `count` of them.
    """
    work, tokens = 0.0, 0
    for place in range(count):
        work += items.work[held[place]]
        tokens += items.tokens[held[place]]
    best = Cut(-1e300, 0, -1, -1, 0.0)
    for first in range(1 << count):
        load, size = _whole(items, held, count, first)
        over = max(0, max(size, tokens - size) - pair.max_tokens)
        value = _value(pair.first - load, pair.second - work + load, over * work / max(tokens, 1), pair)
        if value > best.value:
            best = Cut(value, first, -1, -1, 0.0)
    for one in range(count):
        for other in range(-1, one):
            shared, shared_tokens = items.shared[held[one]], items.shared_tokens[held[one]]
            own, own_tokens = items.work[held[one]] - shared, items.tokens[held[one]] - shared_tokens
            if other >= 0:
                own += items.work[held[other]] - items.shared[held[other]]
                own_tokens += items.tokens[held[other]] - items.shared_tokens[held[other]]
                shared += items.shared[held[other]]
                shared_tokens += items.shared_tokens[held[other]]
            if own <= 0 or own_tokens <= 0 or _room(pair.first + pair.second - work - shared, pair) <= best.value:
                continue
            for first in range(1 << count):
                if first >> one & 1 or (other >= 0 and first >> other & 1):
                    continue
                load, size = _whole(items, held, count, first)
                load, size = load + shared, size + shared_tokens
                rest, rest_size = work + shared - load - own, tokens + shared_tokens - size - own_tokens
                if min(pair.first - load, pair.second - rest) <= best.value:
                    continue
                low = max(LEAST_SHARE, 1 - (pair.max_tokens - rest_size) / own_tokens)
                high = min(1 - LEAST_SHARE, (pair.max_tokens - size) / own_tokens)
                share = min(max(high, 0.0), max(min(low, high), (pair.first - load) / own))
                left, over = pair.first - load - share * own, max(0.0, low - high) * own
                value = _value(left, pair.second - rest - (1 - share) * own, over, pair)
                if value > best.value:
                    best = Cut(value, first, one, other, share)
    return best


@compiled
def _whole(items: Items, held: Integers, count: int, first: int) -> tuple[float, int]:
    """Work and tokens of the items whose bits are set."""
    load, size = 0.0, 0
    for place in range(count):
        if first >> place & 1:
            load += items.work[held[place]]
            size += items.tokens[held[place]]
    return load, size


@compiled
def _value(first: float, second: float, over: float, pair: Pair) -> float:
    """The value of what is left in both micro-batches, if `over`, the work above the cap, is 0."""
    over += max(0.0, -first) + max(0.0, -second)
    return -over if over > 0 else _room(first, pair) + _room(second, pair)


@compiled
def _room(left: float, pair: Pair) -> float:
    """The own work of a part of another group in what is left, or a negative number as it is."""
    if left < 0:
        return left
    return left - pair.price if left - pair.price > pair.least else 0.0
