"""Strategies side by side: figures counted by hand."""

import numpy as np
import pytest

from balancing import CostModel, plan_statistics
from balancing.analysis.strategies import GIVEN, OURS, STRATEGIES, Batch, Schedule, compare, measure

QUADRATIC = CostModel(0.0, 1.0)


def batch_of(lengths, mini_batches=1, ranks=2, max_tokens=100, cost_model=None):
    rows = np.array_split(np.arange(len(lengths)), mini_batches)
    model = cost_model or CostModel.tokens()
    return Batch(np.array(lengths), tuple(rows), ranks, max_tokens, model)


def rows(*steps):
    return [[np.array(group, np.int64) for group in step] for step in steps]


def test_a_packed_schedule_is_measured_by_its_sequences():
    batch = batch_of([30, 10, 20, 40], max_tokens=45)
    outcome = measure("mine", batch, lambda: Schedule([rows([[0, 2], [1]], [[], [3]])]))
    # steps take 50 and 40 where 50 is ideal; rank 0 works 50 of 90, rank 1 as well.
    assert outcome.over_ideal == pytest.approx(0.8)
    assert (outcome.violations, outcome.padding, outcome.micro_batches) == (1, 0.0, 2)
    assert (outcome.idle_mean, outcome.idle_worst) == (pytest.approx(4 / 9), pytest.approx(4 / 9))
    assert outcome.grids[0].tolist() == [[50.0, 10.0], [0.0, 40.0]]


def test_a_padded_schedule_takes_the_time_of_its_padded_rows():
    batch = batch_of([3, 5, 8, 8], max_tokens=16, cost_model=QUADRATIC)
    outcome = measure("padded", batch, lambda: Schedule([rows([[0, 1], [2]], [[3], []])], padded=True))
    # rank 1 sets the width of the first step: two rows of 8 on rank 0.
    assert outcome.grids[0].tolist() == [[128.0, 64.0], [64.0, 0.0]]
    assert outcome.padding == pytest.approx(1 - 24 / 32)
    assert outcome.over_ideal == pytest.approx(192 / (162 / 2) - 1)
    assert (outcome.idle_worst, outcome.violations) == (pytest.approx(2 / 3), 0)


def test_every_strategy_computes_the_batch_and_ours_keeps_the_cap():
    rng = np.random.default_rng(0)
    batch = batch_of(rng.integers(10, 500, 128).tolist(), mini_batches=2, ranks=4, max_tokens=1500)
    outcomes, plan = compare(batch)
    assert [outcome.name for outcome in outcomes] == list(STRATEGIES)
    figures = {outcome.name: outcome for outcome in outcomes}
    assert figures[OURS].violations == figures[GIVEN].violations == 0
    assert figures[OURS].over_ideal == pytest.approx(plan_statistics(plan)["imbalance/micro_steps"])
    assert figures[OURS].over_ideal < figures[GIVEN].over_ideal
    for outcome in outcomes:
        work = sum(grid.sum() for grid in outcome.grids)
        assert work * (1 - outcome.padding) == pytest.approx(batch.lengths.sum())
        assert 0 <= outcome.idle_mean <= outcome.idle_worst < 1
