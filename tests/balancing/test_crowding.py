"""Lower bounds of a partition: never above the optimum, and as high where weights crowd."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.crowding import crowded_bound, lower_bound

weight_lists = st.lists(st.integers(0, 100), min_size=3, max_size=8)


def optimum(weights, k, equal_size):
    least, larger = divmod(len(weights), k)
    return min(
        max(sum(w for w, c in zip(weights, choice, strict=True) if c == s) for s in range(k))
        for choice in product(range(k), repeat=len(weights))
        if not equal_size or all(least <= choice.count(s) <= least + (larger > 0) for s in range(k))
    )


@settings(deadline=None)
@given(weight_lists, st.integers(2, 3), st.booleans(), st.sampled_from([1, 0.1]))
def test_bounds_are_never_above_the_optimum(weights, k, equal_size, unit):
    descending = np.array(sorted(weights, reverse=True)) * unit
    best = optimum(descending, k, equal_size) * (1 + 1e-12)
    assert lower_bound(descending, k) <= crowded_bound(descending, k, equal_size) <= best


def test_whole_numbers_round_the_mean_up():
    assert lower_bound(np.array([3.0, 3, 3, 2]), 2) == 6
    assert lower_bound(np.array([3.5, 3, 3, 2]), 2) == 5.75


def test_of_four_heavy_weights_two_share_one_of_three_sets():
    weights = np.array([10.0, 10, 10, 10, 1, 1])
    assert lower_bound(weights, 3) == 14
    assert crowded_bound(weights, 3, equal_size=False) == 20
    assert crowded_bound(weights, 3, equal_size=True) == 20


def test_with_equal_counts_the_heaviest_have_company():
    # Each of the two giants is with two others: at best 1 and 1 with one, 2 and 2 with the other.
    weights = np.array([100.0, 100, 9, 9, 9, 9, 9, 2, 2, 1, 1, 1])
    assert crowded_bound(weights, 4, equal_size=True) == 103
