"""Strategies side by side: figures counted by hand."""

import numpy as np
import pytest

from balancing import CostModel, plan_statistics
from balancing.analysis.comparison import (
    ON_PIPELINES,
    OURS,
    STRATEGIES,
    Batch,
    compare,
    figures,
    plan_of,
)
from balancing.analysis.statistics import time_grids
from balancing.pipelines.pipeline import Pipeline

QUADRATIC = CostModel(0.0, 1.0)


def batch_of(
    lengths, mini_batches=1, ranks=2, max_tokens=100, cost_model=None, **arguments
):
    rows = np.array_split(np.arange(len(lengths)), mini_batches)
    arguments |= {
        "ranks": ranks,
        "max_tokens": max_tokens,
        "cost_model": cost_model or CostModel.tokens(),
    }
    return Batch(np.array(lengths), {"mini_batches": rows, **arguments})


def rows(*steps):
    return [[np.array(group, np.int64) for group in step] for step in steps]


def test_a_packed_plan_is_measured_by_its_sequences():
    batch = batch_of([30, 10, 20, 40], max_tokens=45)
    found = figures(plan_of([rows([[0, 2], [1]], [[], [3]])], batch, "verl"), batch)
    # steps take 50 and 40 where 50 is ideal; rank 0 works 50 of 90, rank 1 as well.
    shares = {"over ideal": 0.8, "padding": 0.0, "idle, mean": 4 / 9, "idle, worst": 4 / 9}
    assert found == pytest.approx(shares | {"over cap": 1, "micro-steps": 2})


def test_a_padded_plan_takes_the_time_of_its_padded_rows():
    batch = batch_of([3, 5, 8, 8], max_tokens=16, cost_model=QUADRATIC)
    found = figures(plan_of([rows([[0, 1], [2]], [[3], []])], batch, "roll"), batch)
    # two rows of 5 beside one of 8, then one of 8: the ranks work 50 + 64 and 64 of 64 + 64.
    idle = {"idle, mean": 1 - (114 + 64) / 2 / 128, "idle, worst": 0.5}
    shares = {"over ideal": 128 / (162 / 2) - 1, "padding": 1 - 24 / 26}
    assert found == pytest.approx(shares | idle | {"over cap": 0, "micro-steps": 2})


def test_every_strategy_computes_the_batch_and_ours_keeps_the_cap():
    rng = np.random.default_rng(0)
    batch = batch_of(
        rng.integers(10, 500, 128).tolist(), mini_batches=2, ranks=4, max_tokens=1500
    )
    outcomes = compare(batch)
    assert [outcome.name for outcome in outcomes] == list(STRATEGIES)
    given, ours = outcomes[0].figures, outcomes[-1].figures
    assert given["over cap"] == ours["over cap"] == 0
    assert ours["over ideal"] == pytest.approx(
        plan_statistics(batch.plan())["imbalance/micro_steps"]
    )
    assert ours["over ideal"] < given["over ideal"]
    for outcome in outcomes:
        work = sum(grid.sum() for grid in time_grids(outcome.plan))
        assert work * (1 - outcome.figures["padding"]) == pytest.approx(batch.lengths.sum())
        assert 0 <= outcome.figures["idle, mean"] <= outcome.figures["idle, worst"] < 1


def test_on_a_pipeline_our_makespan_is_the_shortest():
    lengths = np.random.default_rng(0).integers(10, 500, 128)
    outcomes = compare(batch_of(lengths, ranks=4, max_tokens=1500, pipeline=Pipeline(4)))
    assert [outcome.name for outcome in outcomes] == list(ON_PIPELINES)
    over = [outcome.figures["over ideal"] for outcome in outcomes]
    assert over[-1] == min(over) > 0
    (plan,) = [outcome.plan for outcome in outcomes if outcome.name == OURS]
    assert 1 + over[-1] == pytest.approx(
        plan.predicted_makespans().sum() / (lengths.sum() / 4 / 4)
    )
