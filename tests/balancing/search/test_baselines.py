"""What other systems do, as published and with the caps kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import CostModel, plan_batch
from balancing.errors import CountError, OptionError, OverCapError
from balancing.search.baselines import PUBLISHED, published_steps


def steps_of(name, lengths, **changes):
    arguments = {
        "ranks": 1,
        "mini_batches": None,
        "max_tokens": 8,
        "workloads": lengths,
        **changes,
    }
    return published_steps(name, lengths, **arguments)


def as_lists(steps):
    return [
        [[rows.tolist() for rows in step] for step in mini_batch] for mini_batch in steps
    ]


@pytest.mark.parametrize("name", ["verl", "mindspeed_rl"])
def test_p12_published_differencing_exceeds_the_cap(name):
    # Eight of 7 at cap 8: 56 / 8 = 7 micro-batches, one of which holds 14.
    (mini_batch,) = steps_of(name, [7] * 8)
    assert sorted(7 * len(step[0]) for step in mini_batch) == [7] * 6 + [14]


@pytest.mark.parametrize("name", ["verl", "mindspeed_rl"])
def test_p12_the_same_strategy_keeps_the_cap_in_a_plan(name):
    plan = plan_batch([7] * 8, ranks=1, max_tokens=8, algorithm=name)
    assert [len(step.ranks[0]) for step in plan.mini_batches[0].micro_steps] == [1] * 8


def test_v8_heavier_micro_batches_come_first():
    lengths = [100, 900, 50, 950, 400, 600]
    expected = [[[[1, 5]], [[0, 2, 3, 4]]]]
    assert (
        as_lists(steps_of("verl", lengths, max_tokens=2000, workloads=np.square(lengths)))
        == expected
    )
    plan = plan_batch(
        lengths, ranks=1, max_tokens=2000, algorithm="verl", cost_model=CostModel(0.0, 1.0)
    )
    assert (
        as_lists([[step.ranks for step in part.micro_steps] for part in plan.mini_batches])
        == expected
    )


def test_p8_verl_deals_equal_counts_by_differencing():
    (mini_batch,) = steps_of("verl", [10, 9, 8, 7], ranks=2, max_tokens=100)
    assert sorted(rows.tolist() for rows in mini_batch[0]) == [[0, 3], [1, 2]]


def test_m8_mindspeed_deals_longest_first_into_the_lightest_rank():
    (mini_batch,) = steps_of("mindspeed_rl", [10, 4, 3, 3], ranks=2, max_tokens=100)
    assert [rows.tolist() for rows in mini_batch[0]] == [[0], [1, 2, 3]]


def test_m5_micro_batches_of_a_rank_are_grouped_by_differencing():
    # Karmarkar-Karp gives 16 and 14, whereas longest-first would give 17 and 13.
    (mini_batch,) = steps_of("mindspeed_rl", [8, 7, 6, 5, 4], max_tokens=20)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in step[0]) for step in mini_batch) == [
        14,
        16,
    ]


def test_d1_roll_sorts_and_deals_with_stride():
    lengths = [7, 6, 8, 5, 1, 3, 8, 6]
    (mini_batch,) = steps_of("roll", lengths, ranks=2, max_tokens=12)
    assert as_lists([mini_batch]) == [[[[4, 3], [5, 1]], [[7], [0]], [[2], [6]]]]


def test_d1_roll_sorts_by_the_true_length_and_keeps_the_order_of_ties():
    # All lengths round up to 8: sorted by what they round up to, the given order would stay.
    plan = plan_batch(
        [7, 6, 8, 5, 6, 7], ranks=2, max_tokens=24, algorithm="roll", length_multiple=8
    )
    (step,) = plan.mini_batches[0].micro_steps
    assert [rows.tolist() for rows in step.ranks] == [[3, 4, 5], [0, 1, 2]]


def test_roll_makes_mini_batches_correlate_with_length():
    lengths = np.random.default_rng(0).integers(1, 100, 64)
    mini_batches = steps_of(
        "roll",
        lengths,
        ranks=2,
        max_tokens=200,
        mini_batches=np.array_split(np.arange(64), 4),
    )
    tokens = [
        sum(int(lengths[rows].sum()) for step in m for rows in step) for m in mini_batches
    ]
    assert tokens == sorted(tokens)
    assert tokens[-1] > 3 * tokens[0]


@settings(max_examples=100)
@given(
    st.sampled_from(PUBLISHED),
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(1, 3),
)
def test_v2_every_index_is_computed_once(name, lengths, ranks, count):
    count = min(count, len(lengths))
    parts = np.array_split(np.arange(len(lengths)), count)
    steps = steps_of(name, lengths, ranks=ranks, mini_batches=parts, max_tokens=64)
    computed = [rows for mini_batch in steps for step in mini_batch for rows in step]
    assert sorted(np.concatenate(computed)) == list(range(len(lengths)))
    assert all(len(step) == ranks for mini_batch in steps for step in mini_batch)


def test_bad_input_is_named():
    with pytest.raises(OptionError, match="name='slime'"):
        steps_of("slime", [1, 2])
    with pytest.raises(OverCapError, match=r"lengths\[1\] is 9 tokens"):
        steps_of("verl", [1, 9])
    with pytest.raises(CountError, match="cannot fill 1 micro-batches on each of 3 ranks"):
        plan_batch([5, 6], ranks=3, max_tokens=10, algorithm="roll", allow_empty=False)
