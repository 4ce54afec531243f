"""Why ranks wait: each cause recognised on a batch made for it, and nothing unaccounted for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import CostModel, plan_batch, plan_statistics
from balancing.analysis.findings import Cause, findings

QUADRATIC = CostModel(1000.0, 1.0)


def waiting_of(plan):
    return [finding for finding in findings(plan) if finding.waiting > 0]


def only(plan, cause):
    (finding,) = waiting_of(plan)
    assert finding.cause is cause
    return finding


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=2, max_size=60),
    ranks=st.integers(1, 6),
    parts=st.integers(1, 2),
    max_sequences=st.none() | st.integers(1, 5),
    layout=st.sampled_from(["packed", "padded"]),
    algorithm=st.sampled_from(["karmarkar_karp", "karmarkar_karp", "none", "verl"]),
)
def test_waiting_by_cause_adds_up_to_the_plans_idle_share(lengths, ranks, parts, max_sequences, layout, algorithm):
    plan = plan_batch(
        lengths,
        ranks=ranks,
        mini_batches=np.array_split(np.arange(len(lengths)), parts),
        max_tokens=600,
        max_sequences=max_sequences,
        layout=layout,
        algorithm=algorithm,
        cost_model=QUADRATIC,
    )
    found = findings(plan)
    assert sum(finding.waiting for finding in found) == pytest.approx(plan_statistics(plan)["idle_share"], abs=1e-6)
    assert len({finding.cause for finding in found}) == len(found)
    assert all(type(value) is float for finding in found for value in finding.numbers.values())


def test_an_even_plan_waits_for_nothing():
    assert waiting_of(plan_batch([7] * 8, ranks=4, max_tokens=14)) == []


def test_a_long_sequence_is_named_with_its_share():
    plan = plan_batch([10, 10, 10, 10, 60], ranks=4, max_tokens=100)
    finding = only(plan, Cause.LONG_SEQUENCE)
    assert finding.numbers["sequence"] == 4
    assert finding.numbers["tokens"] == 60
    assert finding.numbers["share"] == pytest.approx(0.6)
    assert finding.numbers["fair_share"] == 0.25
    assert finding.waiting == pytest.approx((60 - 25) / 60)


def test_too_few_sequences_are_told_from_empty_micro_batches():
    few = only(plan_batch([5, 5, 5], ranks=4, max_tokens=10), Cause.FEW_SEQUENCES)
    assert few.numbers["empty"] == 1
    assert few.waiting == pytest.approx(0.25)
    forced = only(plan_batch([5] * 5, ranks=2, max_tokens=10, min_count=3), Cause.EMPTY_MICRO_BATCHES)
    assert forced.waiting == pytest.approx(1 / 6)


def test_the_given_order_is_to_blame_where_it_was_asked_for():
    plan = plan_batch([9, 9, 1, 1], ranks=2, max_tokens=20, algorithm="none")
    assert only(plan, Cause.GIVEN_ORDER).waiting == pytest.approx(8 / 18)


@pytest.mark.parametrize("algorithm", ["verl", "roll", "mindspeed_rl"])
def test_planning_rank_by_rank_is_to_blame_where_it_was_asked_for(algorithm):
    lengths = np.random.default_rng(0).integers(1, 300, 64)
    plan = plan_batch(lengths, ranks=4, max_tokens=600, algorithm=algorithm, cost_model=QUADRATIC)
    finding = only(plan, Cause.RANK_BY_RANK)
    assert finding.waiting == pytest.approx(plan_statistics(plan)["idle_share"])


def test_caps_are_to_blame_where_lighter_micro_batches_are_full():
    # Ten tokens to a micro-batch either way, but one sequence of ten costs more than ten of one.
    plan = plan_batch([9, 9, 6, 6, 3, 3], ranks=2, max_tokens=18, max_sequences=3, cost_model=CostModel(0.0, 1.0))
    assert waiting_of(plan) == []
    by_sequences = plan_batch([8, 7, 7, 1], ranks=2, max_tokens=100, max_sequences=2)
    finding = only(by_sequences, Cause.MAX_SEQUENCES)
    assert finding.numbers["over_mean"] == pytest.approx(14 / 11.5 - 1)
    by_tokens = plan_batch([6, 6, 3, 3, 3, 3], ranks=2, max_tokens=12, cost_model=CostModel(0.0, 1.0))
    assert waiting_of(by_tokens) == []


def test_the_count_says_what_the_caps_need_and_what_was_asked_for():
    def count(**options):
        return next(
            f for f in findings(plan_batch([10] * 12, ranks=2, max_tokens=30, **options)) if f.cause is Cause.COUNT
        )

    assert count().numbers | {"mini_batch": 0.0} == {
        "mini_batch": 0.0,
        "micro_steps": 2.0,
        "needed": 2.0,
        "asked": 1.0,
        "fill": 1.0,
    }
    asked = count(min_count=3, multiple_of=2).numbers
    assert (asked["micro_steps"], asked["needed"], asked["asked"]) == (4.0, 2.0, 4.0)
    assert asked["fill"] == pytest.approx(0.5)


def test_padding_is_found_where_there_is_any():
    def padding(**options):
        found = findings(plan_batch([9, 7], ranks=1, max_tokens=32, **options))
        return [finding.numbers["share"] for finding in found if finding.cause is Cause.PADDING]

    assert padding() == []
    assert padding(length_multiple=8) == [pytest.approx(1 - 16 / 24)]
    assert padding(layout="padded") == [pytest.approx(1 - 16 / 18)]
