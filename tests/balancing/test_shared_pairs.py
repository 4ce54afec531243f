"""Whole groups in pairs of micro-batches: cuts of one pair, annealing, and the filling that comes out."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.grouping import Floats, Integers
from balancing.packing import Caps
from balancing.shared_annealing import DRAWS, EXCESS, MOST_IN_PAIR, USED, Pairs, anneal, pair_at
from balancing.shared_filling import Groups
from balancing.shared_pairing import fill_pairs
from balancing.shared_pairs import LEAST_SHARE, Cut, Items, Pair, best_cut


def random_items(generator: np.random.Generator, count: int) -> Items:
    """Beginnings and own parts of 1 to 40 tokens, 1 to 1.2 units of work for each."""
    shared, own = generator.integers(1, 20, count), generator.integers(1, 40, count)
    factor = generator.uniform(1, 1.2, count)
    return Items((shared + own) * factor, shared + own, shared * factor, shared)


def held_by(items: Items, cut: Cut, place: int) -> tuple[Floats, Floats]:
    """Work and tokens, float64 [2], of the item at `place` in both micro-batches, by definition."""
    beginning = np.array([items.shared[place], items.shared_tokens[place]])
    whole = np.array([items.work[place], items.tokens[place]])
    if place in (cut.one, cut.other):
        both = beginning + np.outer([cut.share, 1 - cut.share], whole - beginning)
    else:
        both = np.outer([cut.first >> place & 1, 1 - (cut.first >> place & 1)], whole)
    return both[:, 0], both[:, 1]


def left_by(items: Items, cut: Cut, pair: Pair) -> tuple[Floats, Floats]:
    """Work that is left below the levels, and tokens below the cap."""
    held = [held_by(items, cut, place) for place in range(len(items.work))]
    work, tokens = (np.sum([each[kind] for each in held], axis=0) for kind in (0, 1))
    return np.array([pair.first, pair.second]) - work, pair.max_tokens - tokens


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(40, 120))
@settings(deadline=None, max_examples=100)
def test_a_pair_is_cut_so_that_it_fits_if_it_can_and_has_the_room_that_it_tells(seed, count, max_tokens):
    generator = np.random.default_rng(seed)
    items, levels = random_items(generator, count), generator.uniform(30, 120, 2)
    pair = Pair(levels[0], levels[1], max_tokens, 5.0, 3.0)
    found = best_cut(items, np.arange(count), count, pair)
    left, free = left_by(items, found, pair)
    if found.value >= 0:
        assert left.min() >= -1e-9
        assert free.min() >= -1e-9
        room = left - pair.price
        assert found.value == pytest.approx(room[room > pair.least].sum())
    elif free.min() >= 0:
        assert found.value == pytest.approx(np.minimum(left, 0).sum())
    for one in range(count):
        for other, first, share in product(range(-1, one), range(1 << count), np.linspace(LEAST_SHARE, 0.97, 12)):
            cut = Cut(0.0, first & ~(1 << one) & ~(1 << max(other, one)), one, other, float(share))
            left, free = left_by(items, cut, pair)
            if free.min() >= 0:
                assert found.value >= min(0.0, left[left < 0].sum()) - 1e-9


def cost(items: Items, pairs: Pairs, pair_of: Integers) -> float:
    """That of shared_annealing.py, by definition."""
    unit = float(np.mean([pairs.first, pairs.second]))
    values = []
    for pair in range(len(pairs.first)):
        held = np.flatnonzero(pair_of == pair)
        values.append(best_cut(items, held, len(held), pair_at(pairs, pair)).value)
    over, room = np.maximum(np.negative(values), 0) / unit, np.maximum(values, 0).sum()
    scattered = (items.work - items.shared)[pair_of == len(pairs.first)].sum()
    return float((over + EXCESS * over**2).sum() + max(0.0, scattered - USED * room) / unit)


@given(st.integers(0, 2**31), st.integers(2, 4))
@settings(deadline=None, max_examples=50)
def test_annealing_ends_at_no_higher_cost_and_scatters_what_it_may(seed, count):
    generator = np.random.default_rng(seed)
    items = random_items(generator, 3 * count)
    pairs = Pairs(generator.uniform(40, 60, count), generator.uniform(20, 40, count), 80, 6.0, 2.0)
    begin, may = np.repeat(np.arange(count), 3), generator.random(3 * count) < 0.3
    found = anneal(items, may, pairs, begin, generator.random((2000, DRAWS)))
    assert cost(items, pairs, found) <= cost(items, pairs, begin) + 1e-9
    assert may[found == count].all()
    assert np.bincount(found, minlength=count + 1)[:count].max() <= MOST_IN_PAIR


def test_annealing_finds_pairs_that_need_no_cut():
    """Levels of 10 and 6; beginnings are so long that a cut costs more than a wrong item."""
    work = np.array([10.0, 10.0, 10.0, 6.0, 6.0, 3.0, 3.0])
    items = Items(work, np.ones(7, np.int64), work / 2, np.zeros(7, np.int64))
    pairs = Pairs(np.full(3, 10.0), np.full(3, 6.0), 10, 5.0, 1.0)
    begin = np.array([0, 0, 0, 1, 1, 2, 2])
    assert cost(items, pairs, begin) > 1
    found = anneal(items, np.zeros(7, np.bool_), pairs, begin, np.random.default_rng(0).random((5000, DRAWS)))
    assert cost(items, pairs, found) == 0
    assert sorted(found[:3]) == [0, 1, 2]


def random_groups(seed: int, count: int) -> Groups:
    """Groups of 1 to 12 sequences, of at most 158 tokens with their beginning; some are larger than a pair."""
    generator = np.random.default_rng(seed)
    members = generator.integers(1, 13, count)
    group = np.repeat(np.arange(count), members)
    tokens = generator.integers(1, 100, len(group))
    shared = generator.integers(0, 60, count)
    own = tokens * generator.uniform(1, 1.3, len(group))
    rows = np.lexsort((-own, group))
    start = np.concatenate([[0], np.cumsum(members)])
    return Groups(own[rows], tokens[rows], group, start, shared * 1.1, shared)


@given(st.integers(0, 2**31), st.integers(4, 40), st.floats(0.9, 1.4), st.integers(160, 300))
@settings(deadline=None, max_examples=120)
def test_pairs_hold_every_sequence_within_the_cap(seed, count, slack, max_tokens):
    groups = random_groups(seed, count)
    work = groups.own.sum() + groups.shared.sum()
    levels = slack * 200 * np.linspace(1.1, 0.9, max(2, round(work / 200)))
    found = fill_pairs(groups, levels, Caps(max_tokens, len(groups.own)))
    if found is None:
        return
    assert found.min() >= 0
    assert found.max() < len(levels)
    for place in np.unique(found):
        rows = found == place
        assert groups.own_tokens[rows].sum() + groups.shared_tokens[np.unique(groups.group[rows])].sum() <= max_tokens


def test_pairs_divide_fewer_groups_than_there_are_micro_batches_and_cheap_ones():
    """128 groups in 112 micro-batches: each group that is whole, or ends where a micro-batch does, saves a cut."""
    generator = np.random.default_rng(0)
    tokens = np.rint(generator.lognormal(np.log(100), 0.6, 2048)).astype(np.int64)
    shared = np.rint(np.exp(generator.uniform(np.log(20), np.log(200), 128))).astype(np.int64)
    group = np.repeat(np.arange(128), 16)
    rows = np.lexsort((-tokens, group))
    groups = Groups(tokens[rows] * 1.0, tokens[rows], group, np.arange(0, 2049, 16), shared * 1.0, shared)
    levels = np.full(112, 1.01 * (tokens.sum() + shared.sum()) / 112)
    found = fill_pairs(groups, levels, Caps(4000, 2048))
    assert found is not None
    parts = np.array([len(np.unique(found[group == each])) for each in range(128)])
    extra = (parts - 1) @ shared
    assert (parts - 1).sum() < 112
    assert extra < 0.75 * np.median(shared) * (parts - 1).sum()


def test_pairs_do_not_suit_many_groups_in_a_micro_batch_nor_large_ones():
    many = random_groups(0, 400)
    assert fill_pairs(many, np.full(20, 1e6), Caps(10**6, len(many.own))) is None
    one = random_groups(0, 1)
    assert fill_pairs(one, np.full(8, 100.0), Caps(300, len(one.own))) is None
