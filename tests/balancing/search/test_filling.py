"""The compiled loops do what they say, and the same without a compiler."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from balancing.basics.compiled import COMPILED
from balancing.search.filling import best_fit, fill_lightest, fill_to_level
from balancing.search.padded import run_starts


def interpreted(kernel):
    return kernel.py_func if COMPILED else kernel


def order_of(weights):
    return np.argsort(-weights, kind="stable")


def placed(kernel, *arguments):
    """The result, after a check that the interpreter gives the same."""
    result = kernel(*arguments)
    assert result.tolist() == interpreted(kernel)(*arguments).tolist()
    return result


lengths = st.lists(st.integers(1, 50), min_size=1, max_size=40).map(np.array)
caps = st.integers(50, 120)
bins = st.integers(1, 8)
sequences = st.integers(1, 6)


def check_caps(assignment, sizes, cap, most):
    inside = assignment >= 0
    assert np.bincount(assignment[inside], sizes[inside], 1).max() <= cap
    assert np.bincount(assignment[inside], minlength=1).max() <= most


@given(lengths, bins, caps, sequences)
def test_lightest_keeps_caps_and_is_the_same_interpreted(sizes, count, cap, most):
    weights = np.square(sizes.astype(float))
    assignment = placed(fill_lightest, order_of(weights), sizes, weights, count, cap, most)
    check_caps(assignment, sizes, cap, most)
    if (assignment >= 0).all() and count <= len(sizes):
        assert len(np.unique(assignment)) == count


def test_lightest_leaves_no_bin_empty_where_sequences_weigh_nothing():
    assert fill_lightest(
        np.arange(4), np.array([1] * 4), np.zeros(4), 4, 10, 9
    ).tolist() == [0, 1, 2, 3]


@given(lengths, caps, sequences)
def test_best_fit_keeps_caps_and_is_the_same_interpreted(sizes, cap, most):
    assignment = placed(best_fit, order_of(sizes), sizes, cap, most)
    assert assignment.min() >= 0
    assert sorted(np.unique(assignment)) == list(range(assignment.max() + 1))
    check_caps(assignment, sizes, cap, most)


@given(lengths, bins, caps, sequences, st.floats(1, 2000))
def test_level_holds_and_is_the_same_interpreted(sizes, count, cap, most, level):
    weights = np.square(sizes.astype(float))
    nowhere = np.full(len(sizes), -1)
    assignment = placed(
        fill_to_level, order_of(weights), sizes, weights, nowhere, count, level, cap, most
    )
    inside = assignment >= 0
    check_caps(assignment, sizes, cap, most)
    assert np.bincount(assignment[inside], weights[inside], 1).max() <= level * (1 + 1e-12)


@given(lengths, bins, caps, sequences, st.sampled_from([np.inf, 90.0, 900.0]), st.data())
def test_level_is_the_lightest_bin_with_room_found_one_by_one(
    sizes, count, cap, most, level, data
):
    weights, places = (
        np.square(sizes // 9 * 1.0),
        st.lists(st.integers(-1, count - 1), min_size=len(sizes)),
    )
    before = np.array(data.draw(places))[: len(sizes)]
    expected = before.copy()
    for index in np.flatnonzero(before < 0):
        inside = [np.flatnonzero(expected == each) for each in range(count)]
        loads = [float(weights[rows].sum()) for rows in inside]
        open_bins = [
            (loads[each], each)
            for each, rows in enumerate(inside)
            if sizes[rows].sum() + sizes[index] <= cap
            and len(rows) < most
            and loads[each] + weights[index] <= level
        ]
        expected[index] = min(open_bins)[1] if open_bins else -1
    order = np.flatnonzero(before < 0)
    assert (
        fill_to_level(order, sizes, weights, before, count, level, cap, most).tolist()
        == expected.tolist()
    )


def test_level_counts_what_is_placed_already():
    weights, placed = np.array([5.0, 4.0, 3.0]), np.array([0, -1, -1])
    assert fill_to_level(
        np.arange(1, 3), np.array([1] * 3), weights, placed, 2, 7.0, 10, 9
    ).tolist() == [
        0,
        1,
        1,
    ]
    assert fill_to_level(
        np.arange(1, 3), np.array([1] * 3), weights, placed, 1, 9.0, 10, 9
    ).tolist() == [
        0,
        0,
        -1,
    ]


@given(lengths, caps, sequences, st.booleans(), st.floats(1, 2000))
def test_runs_are_the_same_interpreted(sizes, cap, most, padded, level):
    starts = placed(
        run_starts, sizes, np.square(sizes.astype(float)), cap, most, padded, level
    )
    assert starts[0] == 0
    assert (np.diff(starts) > 0).all()
