"""Plans of sequences that begin with the same tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import CostModel, Plan, plan_batch, plan_statistics
from balancing.analysis.advice import replan
from balancing.analysis.explain import explanation
from balancing.analysis.statistics import predicted_grids, step_time
from balancing.errors import LengthError, OptionError

COSTS = CostModel(1.0, 0.001)
SLOWER_AT_MOST = 0.03  # than a plan that shares nothing, where there is nearly nothing to share


def planned(lengths, prefixes, size, **arguments) -> Plan:
    """Groups of `size` sequences one after another, each with its prefix."""
    groups = np.repeat(np.arange(len(prefixes)), size)
    arguments = {"cost_model": COSTS, "max_tokens": 2 * int(np.max(lengths))} | arguments
    return plan_batch(lengths, prefix_groups=groups, prefix_lengths=np.repeat(prefixes, size), **arguments)


def test_a_beginning_is_computed_once_in_a_micro_batch():
    """Prompts of 100 and 50 tokens with two responses each, on one rank."""
    plan = planned([110, 120, 60, 70], [100, 50], 2, ranks=1, max_tokens=1000)
    assert plan.mini_batches[0].steps == 1
    assert plan.shared.tolist() == [0, 100, 0, 50]
    assert plan.sizes.sum() == 110 + 20 + 60 + 20
    alone = COSTS.workload([110, 120, 60, 70]).sum()
    assert plan.predicted_times()[0].sum() == pytest.approx(alone - COSTS.workload([100, 50]).sum())
    assert plan_statistics(plan)["shared_tokens"] == pytest.approx(150 / 360)
    assert plan_statistics(plan)["padding_share"] == 0


def test_the_cap_counts_a_beginning_once():
    """Sixteen responses of 10 tokens to a prompt of 900 fit under 1,100 tokens."""
    plan = planned([910] * 16, [900], 16, ranks=1, max_tokens=1100)
    assert plan.mini_batches[0].steps == 1


def test_a_group_is_divided_where_balance_is_worth_more():
    """One group on four ranks: a rank that computes it alone lets three wait."""
    plan = planned([1100] * 16, [100], 16, ranks=4, max_tokens=20_000)
    assert plan.shared.sum() == 12 * 100
    assert [int(load) for load in predicted_grids(plan)[0].sum(axis=0)] == [
        int(4 * COSTS.workload([1100])[0] - 3 * COSTS.workload([100])[0])
    ] * 4


def test_a_group_stays_together_where_that_is_worth_more():
    """Long prompts and short responses, as many groups as ranks."""
    plan = planned([1010] * 64, [1000] * 4, 16, ranks=4, max_tokens=20_000)
    assert plan.shared.sum() == 4 * 15 * 1000


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_every_micro_batch_keeps_the_cap_and_every_sequence_is_computed_once(prefixes, size, ranks, seed):
    generator = np.random.default_rng(seed)
    lengths = np.repeat(prefixes, size) + generator.integers(1, 300, len(prefixes) * size)
    halves = np.array_split(generator.permutation(len(lengths)), min(2, len(lengths)))
    plan = planned(lengths, prefixes, size, ranks=ranks, max_tokens=600, mini_batches=halves)
    assert sorted(np.concatenate([part.rows for part in plan.mini_batches])) == list(range(len(lengths)))
    for part in plan.mini_batches:
        for step in part.micro_steps:
            for rows in step.ranks:
                groups = rows // size
                unique = sum(prefixes[group] for group in set(groups.tolist()))
                tokens = unique + int(sum(lengths[rows] - np.array(prefixes)[groups])) if len(rows) else 0
                assert tokens == plan.sizes[rows].sum() <= 600
    unshared = plan_batch(lengths, ranks=ranks, max_tokens=600, mini_batches=halves, cost_model=COSTS)
    assert step_time(predicted_grids(plan)) <= step_time(predicted_grids(unshared)) * (1 + SLOWER_AT_MOST)


def test_replanning_and_explaining_know_what_is_shared():
    plan = planned([110, 120, 60, 70] * 8, [50] * 16, 2, ranks=2, max_tokens=300)
    assert replan(plan, {}).shared.tolist() == plan.shared.tolist()
    assert explanation(plan).bound >= -1e-9


def test_algorithms_that_plan_without_beginnings_still_compute_them_once():
    plan = planned([110, 120, 60, 70], [100, 50], 2, ranks=1, max_tokens=1000, algorithm="none")
    assert plan.shared.tolist() == [0, 100, 0, 50]


def test_of_a_beginning_whole_multiples_of_the_alignment_count():
    plan = planned([110, 120, 60, 70], [99, 50], 2, ranks=1, max_tokens=1000, length_multiple=8)
    assert plan.shared.tolist() == [0, 96, 0, 48]
    assert plan.sizes.tolist() == [112, 24, 64, 24]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"prefix_lengths": None}, OptionError, "go together"),
        ({"layout": "padded"}, OptionError, "layout='packed'"),
        ({"prefix_lengths": [4, 4]}, LengthError, "not below"),
        ({"prefix_lengths": [3, 2]}, LengthError, "a group has one"),
    ],
)
def test_contradictions_are_refused(arguments, error, text):
    given_arguments = {"prefix_groups": [0, 0], "prefix_lengths": [3, 3], "ranks": 1, "max_tokens": 100} | arguments
    with pytest.raises(error, match=text):
        plan_batch([4, 5], **given_arguments)
