"""Lower bounds: never above what an exhaustive search finds, and tight where heavy weights force waiting."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.search.lower_bounds import fewest_bins, mean_bound, step_time_bound


def bound_of(sizes, weights, ranks, steps, cap, most=99):
    return step_time_bound(
        np.array(sizes),
        np.array(weights, float),
        ranks=ranks,
        steps=steps,
        max_tokens=cap,
        max_sequences=most,
    )


def least_time_by_force(sizes, weights, ranks, steps, cap, most):
    """None where nothing fits."""
    least = None
    for places in product(range(ranks * steps), repeat=len(sizes)):
        tokens, loads, counts = (
            np.bincount(places, values, ranks * steps) for values in (sizes, weights, None)
        )
        if tokens.max() <= cap and counts.max() <= most:
            time = loads.reshape(steps, ranks).max(axis=1).sum()
            least = time if least is None else min(least, time)
    return least


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.sampled_from([(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)]),
    st.integers(12, 24),
    st.integers(1, 3),
    st.booleans(),
)
def test_no_plan_is_faster_than_the_bound(sizes, ranks_and_steps, cap, most, quadratic):
    ranks, steps = ranks_and_steps
    weights = np.square(sizes) if quadratic else np.array(sizes[::-1])
    least = least_time_by_force(sizes, weights, ranks, steps, cap, most)
    if least is not None:
        assert bound_of(sizes, weights, ranks, steps, cap, most).time <= least * (1 + 1e-9)


def test_without_long_sequences_the_bound_is_workload_over_ranks():
    bound = bound_of([1] * 12, [1] * 12, 3, 2, 4)
    assert (bound.time, bound.long_steps) == (4, 0)


def test_one_long_sequence_holds_a_step_up():
    # It lasts 100; the other rank computes at most 10 tokens meanwhile, and two ranks share the 10 that are
    # left.
    bound = bound_of([10, *[1] * 20], [100, *[1] * 20], 2, 2, 10)
    assert (bound.time, bound.long_steps) == (100 + 10 / 2, 1)


def test_sequences_that_fit_together_hold_up_fewer_steps():
    # Three of 5 at cap 10: two fit in a micro-batch, so a single rank needs two steps, not three.
    assert bound_of([5, 5, 5], [7, 7, 7], 1, 3, 10).time == 21
    assert bound_of([5, 5, 5], [7, 7, 7], 2, 3, 10).time == 21 / 2
    assert bound_of([6, 6, 6], [7, 7, 7], 2, 3, 10).time == 14


@pytest.mark.parametrize(
    ("sizes", "capacity", "fewest"),
    [
        ([6, 6, 6], 10, 3),  # L1 is 2; no two fit together
        ([5, 5, 5, 5], 10, 2),
        # Beside a 7 there is no room for a 4, and only two of these fit together.
        ([7, 7, 4, 4, 4], 10, 4),
        ([1] * 7, 7, 1),
    ],
)
def test_v6_martello_toth_bound(sizes, capacity, fewest):
    assert fewest_bins(np.array(sizes), capacity, 99) == fewest


def test_v6_a_cap_on_sequences_bounds_the_count():
    assert fewest_bins(np.array([1] * 7), 100, 2) == 4


weight_lists = st.lists(st.integers(0, 100), min_size=3, max_size=8)


def optimum(weights, k):
    return min(
        np.bincount(chosen, weights, k).max()
        for chosen in product(range(k), repeat=len(weights))
    )


@given(weight_lists, st.integers(2, 3), st.sampled_from([1, 0.1]))
def test_the_bound_on_the_heaviest_set_is_never_above_the_optimum(weights, k, unit):
    descending = np.array(sorted(weights, reverse=True)) * unit
    assert mean_bound(descending, k) <= optimum(descending, k) * (1 + 1e-12)


def test_whole_numbers_round_the_mean_up():
    assert mean_bound(np.array([3.0, 3, 3, 2]), 2) == 6
    assert mean_bound(np.array([3.5, 3, 3, 2]), 2) == 5.75
