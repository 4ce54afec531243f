"""Long sequences, which cannot be cut, in the shapes that plans for pipelines follow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancing import CostModel, plan_batch, plan_statistics
from balancing.analysis.distributions import draw
from balancing.basics.grouping import Caps
from balancing.pipelines.micro_step_targets import (
    Levels,
    best_shape,
    covered_shape,
    levels_of,
)
from balancing.pipelines.pipeline import Pipeline

COSTS = CostModel(4.2e10, 6e5)
CAP = 400


def held(times: np.ndarray, levels: Levels) -> np.ndarray:
    """Of each level, how many of its sequences a rank has room for."""
    fitting = np.floor(times[:, None] / levels.weights * (1 + 1e-9))
    return np.minimum(fitting, levels.together).sum(0)


@given(
    st.lists(st.integers(1, CAP), min_size=12, max_size=80),
    st.integers(1, 4),
    st.sampled_from([Pipeline(2), Pipeline(4), Pipeline(2, 2)]),
)
def test_every_plan_has_room_for_each_level(
    lengths: list[int], ranks: int, pipeline: Pipeline
) -> None:
    plan = plan_batch(
        lengths, ranks=ranks, max_tokens=CAP, cost_model=COSTS, pipeline=pipeline
    )
    sizes = np.sort(np.array(lengths))[::-1]
    levels = levels_of(
        sizes, COSTS.workload(sizes), ranks, Caps(CAP, len(lengths)), len(lengths)
    )
    times = plan.predicted_times()[0]
    assert (held(np.asarray(times), levels) >= np.arange(1, len(levels.weights) + 1)).all()


def test_a_shape_is_raised_where_the_longest_sequence_would_not_fit() -> None:
    pipeline, levels = Pipeline(4), Levels(np.array([1.5, 1.4]), np.array([2.0, 2.0]))
    free, covered = (
        best_shape(pipeline, 16, 2.0),
        covered_shape(pipeline, 16, 2.0, levels),
    )
    assert (held(free.times, levels) < [1, 2]).any()
    assert (held(covered.times, levels) >= [1, 2]).all()
    assert covered.times.mean() == pytest.approx(1.0)
    assert covered.makespan >= free.makespan * (1 - 1e-3)


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("name", ["lognormal", "reasoning", "agentic", "grouped"])
def test_plans_of_long_tails_are_within_two_percent_of_their_bound(
    name: str, virtual: int
) -> None:
    """8,192 sequences on 64 ranks and 4 stages, as in docs/balancing-benchmark.md."""
    lengths = draw(name, 8192, 0)
    cap = 2 * int(lengths.max())
    plan = plan_batch(
        lengths, ranks=64, max_tokens=cap, cost_model=COSTS, pipeline=Pipeline(4, virtual)
    )
    assert 0 <= plan_statistics(plan)["pipeline/over_bound"] < 0.02
