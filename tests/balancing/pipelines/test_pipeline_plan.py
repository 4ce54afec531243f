"""Plans for pipelines: counts, orders, invariants, and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import CostModel, plan_batch, plan_statistics
from balancing.analysis.distributions import draw
from balancing.analysis.explain import explain, replan
from balancing.errors import CountError, OptionError
from balancing.pipelines.pipeline import Pipeline
from balancing.pipelines.pipeline_time import makespan

COSTS = CostModel(4.2e10, 6e5)
EXAMPLE = [7, 6, 8, 5, 1, 3, 8, 6]
"""The published lengths of dynamic batching; two ranks, cap 12, multiple 2."""


@pytest.mark.parametrize(
    ("pipeline", "steps"), [(Pipeline(4), 3), (Pipeline(2, 2), 4), (Pipeline(4, 2), 4)]
)
def test_d5_the_published_example_is_split_until_the_count_divides(
    pipeline: Pipeline, steps: int
):
    """Two or four interleaved stages need a multiple; 1F1B takes any number."""
    plan = plan_batch(
        EXAMPLE,
        ranks=2,
        max_tokens=12,
        length_multiple=2,
        layout="padded",
        algorithm="roll",
        pipeline=pipeline,
    )
    assert plan.mini_batches[0].steps == steps


def test_v6_counts_are_multiples_and_impossible_ones_are_refused():
    plan = plan_batch(
        [100, 900, 50, 950, 400, 600], ranks=1, max_tokens=2000, pipeline=Pipeline(2, 2)
    )
    assert plan.mini_batches[0].steps % 2 == 0
    both = plan_batch(
        [5] * 40, ranks=2, max_tokens=20, pipeline=Pipeline(2, 2), multiple_of=3
    )
    assert both.mini_batches[0].steps % 6 == 0
    with pytest.raises(CountError, match="3 sequences cannot fill 4 micro-batches"):
        plan_batch([5, 5, 5], ranks=1, max_tokens=20, pipeline=Pipeline(4, 2))


def test_v8_the_published_order_can_be_asked_for():
    lengths, pipeline = [30, 7, 50, 20, 40, 10], Pipeline(2)
    plan = plan_batch(
        lengths, ranks=1, max_tokens=50, min_count=5, pipeline=pipeline, order="small_ends"
    )
    times = plan.predicted_times()[0]
    assert times.argmin() in (0, len(times) - 1)
    assert 0 < times.argmax() < len(times) - 1


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 200), min_size=8, max_size=60),
    st.integers(1, 3),
    st.sampled_from(
        [Pipeline(1), Pipeline(2), Pipeline(4), Pipeline(2, 2), Pipeline(3, backward=0.0)]
    ),
    st.sampled_from(["packed", "padded"]),
    st.sampled_from([1, 3]),
)
def test_plans_keep_every_guarantee_and_are_no_slower_than_the_published_order(
    lengths, ranks, pipeline, layout, least
):
    how = {
        "ranks": ranks,
        "max_tokens": 250,
        "max_sequences": 20,
        "pipeline": pipeline,
        "layout": layout,
    }
    plan = plan_batch(lengths, min_count=least, cost_model=COSTS, **how)
    (part,) = plan.mini_batches
    assert sorted(part.rows.tolist()) == list(range(len(lengths)))
    assert part.steps >= least
    assert part.steps % pipeline.count_multiple == 0
    for step in part.micro_steps:
        assert any(len(rows) for rows in step.ranks)
        for rows in step.ranks:
            longest = plan.lengths[rows].max(initial=0)
            tokens = len(rows) * longest if layout == "padded" else plan.lengths[rows].sum()
            assert tokens <= 250
            assert len(rows) <= 20
    published = plan_batch(
        lengths, min_count=least, cost_model=COSTS, order="small_ends", **how
    )
    # The fewest micro-steps within 1 % of the least are taken.
    assert plan.predicted_makespans()[0] <= published.predicted_makespans()[0] * 1.01 * (
        1 + 1e-9
    )
    numbers = plan_statistics(plan)
    assert numbers["pipeline/over_bound"] >= -1e-9
    assert 0.0 <= numbers["pipeline/bubble"] < 1.0


@pytest.mark.parametrize("pipeline", [Pipeline(4), Pipeline(4, 2)])
def test_long_tails_come_near_the_bound_and_far_below_the_published_order(
    pipeline: Pipeline,
):
    lengths = draw("agentic", 2048, 0)
    how = {"ranks": 16, "max_tokens": 65536, "cost_model": COSTS, "pipeline": pipeline}
    plan = plan_batch(lengths, **how)
    published = plan_batch(lengths, **how, order="small_ends")
    given_order = plan_batch(lengths, **how, algorithm="none")
    assert plan_statistics(plan)["pipeline/over_bound"] < 0.02
    times = [
        float(each.predicted_makespans().sum()) for each in (plan, published, given_order)
    ]
    assert times[0] < 0.95 * times[1]
    assert times[1] < times[2]


def test_an_overhead_of_each_micro_step_makes_them_fewer():
    lengths = draw("lognormal", 512, 0)

    def steps(overhead: float) -> int:
        pipeline = Pipeline(4, overhead=overhead)
        plan = plan_batch(
            lengths, ranks=4, max_tokens=16384, cost_model=COSTS, pipeline=pipeline
        )
        return plan.mini_batches[0].steps

    mean = float(COSTS.workload(lengths).sum()) / 4
    assert steps(0.2 * mean) < steps(0.0)


def test_shared_prompts_are_planned_for_a_pipeline():
    groups = np.repeat(np.arange(16), 8)
    how = {
        "ranks": 2,
        "max_tokens": 4000,
        "prefix_groups": groups,
        "prefix_lengths": [300] * 128,
    }
    plan = plan_batch(draw("uniform", 128, 0) // 8 + 301, **how, pipeline=Pipeline(2))
    (times,) = plan.predicted_times()
    assert plan.predicted_makespans()[0] == pytest.approx(makespan(Pipeline(2), times))
    assert plan_statistics(plan)["pipeline/over_bound"] >= 0


def test_without_a_pipeline_nothing_changes():
    plan = plan_batch(draw("lognormal", 256, 0), ranks=4, max_tokens=16384)
    assert plan.settings.order == "descending"
    assert not [name for name in plan_statistics(plan) if name.startswith("pipeline/")]
    assert plan.predicted_makespans()[0] == pytest.approx(plan.predicted_times()[0].sum())


def test_the_explanation_tells_the_bubble_and_plans_again_with_the_pipeline():
    plan = plan_batch(
        draw("lognormal", 256, 0),
        ranks=4,
        max_tokens=16384,
        cost_model=COSTS,
        pipeline=Pipeline(4),
    )
    text = explain(plan)
    numbers = plan_statistics(plan)
    assert f"On a pipeline of 4 stages: bubble {numbers['pipeline/bubble']:.2%}" in text
    assert "because more of them fill and drain the pipeline sooner" in text
    assert replan(plan, {}).predicted_makespans().sum() == pytest.approx(
        numbers["pipeline/predicted_time"]
    )
    published = replan(plan, {"order": "small_ends"})
    assert 'order="makespan": ' in explain(published)


@pytest.mark.parametrize(
    "changes", [{"order": "makespan"}, {"order": "makespan", "algorithm": "none"}]
)
def test_an_order_for_a_pipeline_without_one_is_refused(changes):
    pipeline = Pipeline(2) if "algorithm" in changes else None
    with pytest.raises(OptionError, match="order='makespan' plans for a pipeline"):
        plan_batch([5, 6, 7], ranks=1, max_tokens=10, pipeline=pipeline, **changes)
