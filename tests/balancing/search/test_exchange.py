"""Exchanges between groups: what they reach, and the caps they keep."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancing.basics.grouping import Caps, Grouping
from balancing.search.exchange import even_out, exchange_until_even

FREE = Caps(10**6, 10**6)


def loads(groups, weights):
    return [sum(weights[i] for i in group) for group in groups]


def evened(groups, weights, caps=FREE, sizes=None, **options):
    """Index lists in, index lists out."""
    sizes = np.array(weights if sizes is None else sizes)
    after = even_out(
        Grouping.of(groups, len(weights)), np.array(weights, float), sizes, caps, **options
    )
    return [members.tolist() for members in after.members()]


@st.composite
def cases(draw):
    """Groups that keep their caps, with sizes that need not follow the weights."""
    weights = np.array(draw(st.lists(st.integers(0, 300), min_size=1, max_size=40)), float)
    sizes = np.array(
        draw(st.lists(st.integers(1, 50), min_size=len(weights), max_size=len(weights)))
    )
    count = draw(st.integers(1, 8))
    equal_size = draw(st.booleans())
    group_of = np.arange(len(weights)) % count
    if not equal_size:
        group_of = np.array(
            draw(
                st.lists(
                    st.integers(0, count - 1), min_size=len(weights), max_size=len(weights)
                )
            )
        )
    tokens = int(np.bincount(group_of, weights=sizes, minlength=count).max()) + draw(
        st.integers(0, 30)
    )
    sequences = int(np.bincount(group_of).max()) + draw(st.integers(0, 2))
    return Grouping(group_of, count), weights, sizes, Caps(tokens, sequences), equal_size


@given(cases(), st.booleans())
def test_m3_m4_caps_hold_the_heaviest_never_grows_and_the_interpreter_agrees(
    case, only_heaviest
):
    before, weights, sizes, caps, equal_size = case
    after = even_out(
        before, weights, sizes, caps, equal_size=equal_size, only_heaviest=only_heaviest
    )
    assert (after.sizes()[before.sizes() > 0] > 0).all()
    assert after.sums(sizes).max() <= caps.max_tokens
    assert after.sizes().max() <= caps.max_sequences
    assert not equal_size or np.ptp(after.sizes()) <= 1
    assert after.sums(weights).max() <= before.sums(weights).max()
    order = np.argsort(-weights, kind="stable")
    arguments = (
        weights[order],
        sizes[order].astype(float),
        before.group_of[order],
        before.count,
    )
    limits = (
        float(caps.max_tokens),
        float(caps.max_sequences),
        equal_size,
        only_heaviest,
        weights.mean(),
        10_000_000,
    )
    interpreted = getattr(exchange_until_even, "py_func", exchange_until_even)
    assert (
        exchange_until_even(*arguments, *limits).tolist()
        == interpreted(*arguments, *limits).tolist()
    )


@pytest.mark.parametrize(
    ("groups", "weights", "equal_size", "expected"),
    [
        ([[0, 1, 2], [3]], [4, 3, 3, 4], False, [7, 7]),  # a move
        ([[0, 1], [2, 3]], [9, 8, 2, 1], True, [10, 10]),  # one for one
        # 62 against 58: one for one changes them by 5, 12, .. or by less than nothing; 10 and 2 for 5 and 5
        # takes 2.
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [40, 10, 10, 2, 28, 20, 5, 5], True, [60, 60]),
    ],
)
def test_moves_and_exchanges_of_one_or_two_even_groups(
    groups, weights, equal_size, expected
):
    after = evened(groups, weights, equal_size=equal_size)
    assert loads(after, weights) == expected
    assert len({len(group) for group in after}) == 1


@pytest.mark.parametrize(
    ("groups", "weights", "caps", "equal_size", "expected"),
    [
        # The larger group becomes the smaller.
        ([[0, 1, 2], [3, 4]], [4, 5, 1, 1, 6], FREE, True, [9, 8]),
        # A full group only exchanges.
        ([[0, 1], [2, 3, 4]], [6, 2, 1, 1, 1], Caps(100, 3), False, [7, 4]),
        ([[0, 1], [2, 3, 4]], [6, 2, 1, 1, 1], Caps(100, 4), False, [6, 5]),
    ],
)
def test_a_move_asks_for_counts(groups, weights, caps, equal_size, expected):
    assert loads(evened(groups, weights, caps, equal_size=equal_size), weights) == expected


@pytest.mark.parametrize("equal_size", [False, True])
def test_no_exchange_empties_a_group(equal_size: bool) -> None:
    """One heavy sequence beside none: to move it away would even the loads no better and leave no group."""
    assert evened([[0], [1]], [9, 2], equal_size=equal_size) == [[0], [1]]
    after = evened([[0], [1, 2, 3]], [9, 1, 1, 1], equal_size=False)
    assert all(after)


def test_a_cap_on_tokens_turns_to_the_next_best_exchange():
    # 6 for 2 would even the weights, but takes 9 tokens to where there is room for 8.
    weights, sizes = [6, 5, 1, 2], [9, 3, 4, 2]
    assert loads(evened([[0, 1], [2, 3]], weights, sizes=sizes), weights) == [7, 7]
    capped = evened([[0, 1], [2, 3]], weights, Caps(12, 9), sizes)
    assert sorted(loads(capped, weights)) == [6, 8]
    assert max(loads(capped, sizes)) <= 12


def test_only_heaviest_leaves_the_others_as_they_are():
    weights, groups = [50, 30, 15, 2, 3], [[0], [1, 2], [3, 4]]
    assert evened(groups, weights, only_heaviest=True) == groups
    assert sorted(loads(evened(groups, weights), weights)) == [20, 30, 50]


@pytest.mark.parametrize("only_heaviest", [True, False])
def test_target_ends_the_search(only_heaviest):
    assert evened(
        [[0, 1], [2, 3]], [9, 8, 2, 1], only_heaviest=only_heaviest, target=17.0
    ) == [
        [0, 1],
        [2, 3],
    ]
