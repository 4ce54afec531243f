"""Figures of a plan, counted by hand; those of V3 are in test_plan."""

import numpy as np
import pytest

from balancing import CostModel, plan_batch, plan_statistics
from balancing.analysis.statistics import (
    ideal_time,
    indices_of,
    padding_share,
    predicted_grids,
    step_time,
)

SQUARES = CostModel(0.0, 1.0)


def planned(**options):
    lengths = [10, 6, 3, 3, 2, 2]
    return plan_batch(
        lengths,
        ranks=2,
        mini_batches=[[0, 1], [2, 3, 4, 5]],
        max_tokens=12,
        cost_model=SQUARES,
        **options,
    )


def test_the_time_of_every_micro_batch_is_its_workload():
    plan = planned()
    first, second = predicted_grids(plan)
    assert sorted(first.ravel()) == [36.0, 100.0]
    assert second.tolist() == [[13.0, 13.0]]
    assert step_time([first, second]) == 113.0
    assert ideal_time([first, second]) == (36 + 100 + 26) / 2
    for grid, times in zip(predicted_grids(plan), plan.predicted_times(), strict=True):
        assert times.tolist() == grid.max(axis=1).tolist()


def test_predicted_times_are_reported_in_the_cost_models_unit():
    statistics = plan_statistics(planned())
    assert statistics["predicted_time/total"] == 113.0
    assert statistics["predicted_time/longest_micro_step"] == 100.0
    # As given, the second mini-batch is 9 + 9 against 4 + 4.
    assert statistics["predicted_time_before/total"] == 118.0
    assert statistics["predicted_time_before/longest_micro_step"] == 100.0
    assert statistics["imbalance/micro_steps"] == pytest.approx(113 / 81 - 1)


def test_the_sequences_of_a_mini_batch_come_ascending():
    assert [indices_of(mini_batch).tolist() for mini_batch in planned().mini_batches] == [
        [0, 1],
        [2, 3, 4, 5],
    ]


def test_padding_counts_alignment_and_rows_up_to_the_longest():
    assert padding_share(planned()) == 0.0
    assert padding_share(planned(length_multiple=4)) == pytest.approx(1 - 26 / 36)
    padded = planned(layout="padded")
    rows = [
        np.array(plan_rows)
        for step in padded.mini_batches[1].micro_steps
        for plan_rows in step.ranks
    ]
    cells = 16 + sum(len(part) * padded.lengths[part].max() for part in rows if len(part))
    assert padding_share(padded) == pytest.approx(1 - 26 / cells)
