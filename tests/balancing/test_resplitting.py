"""Small groups, split anew in the best of all ways."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.exchange import Limits, even_out_arrays
from balancing.partition import longest_first
from balancing.resplitting import resplit_until_even

small_weights = st.lists(st.integers(0, 300), min_size=2, max_size=9)


def descending(weights):
    return np.array(sorted(weights, reverse=True), float)


@settings(deadline=None)  # the first example compiles
@given(small_weights, st.booleans())
def test_two_groups_are_split_in_the_best_of_all_ways(weights, equal_size):
    weights = descending(weights)
    after = resplit_until_even(weights, np.arange(len(weights)) % 2, 2, equal_size, weights.sum() / 2)
    sizes = [len(weights) // 2] if equal_size else range(1, len(weights))
    halves = (weights[list(half)].sum() for size in sizes for half in combinations(range(len(weights)), size))
    assert np.bincount(after, weights=weights).max() == min(max(half, weights.sum() - half) for half in halves)
    if equal_size:
        assert sorted(np.bincount(after)) == [len(weights) // 2, -(-len(weights) // 2)]


def test_four_for_four_where_no_exchange_of_two_helps():
    weights = descending([51, 51, 49, 45, 37, 34, 30, 30, 27, 22, 7, 5])
    start = np.array([1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0])
    exchanged = even_out_arrays(start, 2, weights, np.ones(12, int), Limits(equal_size=True), only_heaviest=True)
    assert np.bincount(exchanged, weights=weights).tolist() == [193, 195]
    after = resplit_until_even(weights, start, 2, True, 194.0)
    assert np.bincount(after, weights=weights).tolist() == [194, 194]


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(1, 8), st.booleans())
def test_compiled_and_interpreted_splits_agree_and_never_worsen(weights, count, equal_size):
    weights = descending(weights)
    start = longest_first(weights, count, equal_size)
    arguments = (weights, start, count, equal_size, weights.sum() / count)
    after = resplit_until_even(*arguments)
    assert after.tolist() == getattr(resplit_until_even, "py_func", resplit_until_even)(*arguments).tolist()
    assert np.bincount(after, weights=weights).max() <= np.bincount(start, weights=weights).max()
    assert not equal_size or sorted(np.bincount(after, minlength=count)) == sorted(np.bincount(start, minlength=count))
