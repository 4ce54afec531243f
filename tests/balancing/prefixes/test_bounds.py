"""Lower bounds for sequences that share prefixes, against all plans of tiny batches."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import CostModel, plan_batch, plan_statistics
from balancing.analysis.statistics import lower_bound, predicted_grids, step_time
from balancing.prefixes.bounds import fewest_parts, prefix_step_time_bound
from balancing.prefixes.groups import Groups, SharedPrefixes

COSTS = CostModel(1.0, 0.01)
ROUNDING = 1 + 1e-9


def groups_of(own, sizes, prefixes) -> Groups:
    """Groups of `sizes` sequences one after another, of `own` tokens after their `prefixes`."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    tokens = np.asarray(prefixes)[group]
    lengths = np.asarray(own) + tokens
    prefixes = SharedPrefixes.of(group, tokens, COSTS.workload(tokens))
    return prefixes.in_groups(lengths, COSTS.workload(lengths))[0]


def loads(groups: Groups, places, count):
    """Tokens, workload and sequences of each micro-batch."""
    keys = np.unique(places * len(groups.shared) + groups.group)
    place, group = keys // len(groups.shared), keys % len(groups.shared)
    tokens = np.bincount(places, groups.own_tokens, count) + np.bincount(
        place, groups.shared_tokens[group], count
    )
    work = np.bincount(places, groups.own, count) + np.bincount(
        place, groups.shared[group], count
    )
    return tokens, work, np.bincount(places, minlength=count)


@st.composite
def tiny(draw):
    sizes = draw(
        st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(
            lambda sizes: sum(sizes) <= 6
        )
    )
    prefixes = draw(st.lists(st.integers(1, 60), min_size=len(sizes), max_size=len(sizes)))
    own = draw(st.lists(st.integers(1, 60), min_size=sum(sizes), max_size=sum(sizes)))
    ranks, steps = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (1, 3)]))
    longest = max(own) + max(prefixes)
    return (
        groups_of(own, sizes, prefixes),
        ranks,
        steps,
        draw(st.integers(longest, 3 * longest)),
    )


@given(tiny(), st.integers(1, 6))
@settings(max_examples=150)
def test_no_plan_is_below_the_bounds(batch, max_sequences):
    groups, ranks, steps, cap = batch
    parts, count = fewest_parts(groups, cap, max_sequences), ranks * steps
    time = prefix_step_time_bound(groups, ranks, steps, cap, max_sequences).time
    for places in map(np.array, product(range(count), repeat=len(groups.own))):
        tokens, work, members = loads(groups, places, count)
        if tokens.max() > cap or members.max() > max_sequences:
            continue
        assert time <= work.reshape(steps, ranks).max(axis=1).sum() * ROUNDING
        of_group = [
            len(np.unique(places[groups.group == group]))
            for group in range(len(groups.shared))
        ]
        assert (parts <= of_group).all()


def test_a_group_above_the_cap_computes_its_prefix_in_every_part():
    """50 tokens are left beside a prefix of 100: 4 sequences of 10 in each of 4 micro-batches, 5
    by tokens.
    """
    groups = groups_of([10] * 16, [16], [100])
    assert fewest_parts(groups, 150, 16).tolist() == [4]
    assert fewest_parts(groups, 150, 3).tolist() == [6]
    # No two fit together.
    assert fewest_parts(groups_of([30] * 4, [4], [100]), 150, 16).tolist() == [4]


def test_one_long_sequence_holds_a_step_up_with_its_prefix():
    groups = groups_of([500, 1, 1, 1], [2, 2], [400, 10])
    bound = prefix_step_time_bound(groups, 4, 1, 1000, 4)
    assert bound.time == pytest.approx(float(COSTS.workload(np.array([900]))[0]))


def test_statistics_compare_the_time_with_the_bound():
    groups = np.repeat(np.arange(8), 4)
    lengths = 50 + np.random.default_rng(0).integers(1, 60, 32)
    plan = plan_batch(
        lengths,
        ranks=2,
        max_tokens=300,
        cost_model=COSTS,
        prefix_groups=groups,
        prefix_lengths=[50] * 32,
    )
    assert plan_statistics(plan)["over_bound"] == pytest.approx(
        step_time(predicted_grids(plan)) / lower_bound(plan) - 1
    )
    assert plan_statistics(plan)["over_bound"] >= 0
