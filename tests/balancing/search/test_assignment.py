"""Karmarkar-Karp over ranks and micro-batches, and the repair of caps."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.search.assignment import karmarkar_karp_twice, repair_caps
from balancing.search.partition import karmarkar_karp


def test_p8_p9_ranks_are_those_of_karmarkar_karp_and_their_heaviest_micro_batches_come_first():
    weights = np.array([9.0, 8, 7, 6, 5, 4, 3, 2])
    grouping = karmarkar_karp_twice(weights, 2, 2)
    assert (grouping.group_of % 2).tolist() == karmarkar_karp(weights, 2).tolist()
    loads = grouping.sums(weights).reshape(2, 2)
    assert (loads[0] >= loads[1]).all()
    assert loads.sum(axis=0).tolist() == [22, 22]


def test_a_rank_with_fewer_sequences_than_steps_has_empty_micro_batches():
    assert sorted(
        karmarkar_karp_twice(np.array([9.0, 1, 1, 1]), 2, 2).sizes().tolist()
    ) == [0, 1, 1, 2]


def test_a_sequence_above_the_cap_goes_to_the_lightest_group_with_room():
    sizes = np.array([6, 4, 3, 3])
    group_of = repair_caps(sizes, sizes.astype(float), np.array([0, 0, 0, 1]), 2, 9, 4)
    assert group_of.tolist() == [0, 1, 0, 1]


def test_a_sequence_that_fits_nowhere_is_left_out():
    sizes = np.array([6, 6, 6])
    assert (
        repair_caps(sizes, sizes.astype(float), np.array([0, 0, 1]), 2, 11, 4) < 0
    ).sum() == 1


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 40), min_size=4, max_size=40),
    st.integers(1, 4),
    st.integers(40, 120),
    st.integers(1, 12),
)
def test_m3_m4_repaired_groups_keep_the_caps_and_none_is_empty(
    lengths, count, max_tokens, max_sequences
):
    sizes = np.sort(np.array(lengths))[::-1].copy()
    weights = sizes.astype(float)
    start = karmarkar_karp_twice(weights, 1, count).group_of
    group_of = repair_caps(sizes, weights, start, count, max_tokens, max_sequences)
    placed = group_of >= 0
    assert np.bincount(group_of[placed], sizes[placed], count).max() <= max_tokens
    assert np.bincount(group_of[placed], minlength=count).max() <= max_sequences
    if placed.all():
        assert np.bincount(group_of, minlength=count).min() > 0
