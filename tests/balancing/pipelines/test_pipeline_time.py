"""Makespans of pipelines: closed forms, bounds, orders and shapes."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.errors import CountError, WeightError
from balancing.pipelines.micro_step_targets import best_shape, least_makespan
from balancing.pipelines.pipeline import Pipeline
from balancing.pipelines.pipeline_time import fastest_order, makespan, timeline
from balancing.search.orders import small_ends

TIMES = st.floats(0.0, 10.0)


@st.composite
def pipelines_with_times(draw: st.DrawFn) -> tuple[Pipeline, np.ndarray]:
    stages, virtual = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    pipeline = Pipeline(
        stages,
        virtual if stages > 1 else 1,
        backward=draw(st.sampled_from([0.0, 1.0, 2.0])),
        transfer=draw(st.sampled_from([0.0, 0.1])),
    )
    count = draw(st.integers(1, 3)) * pipeline.count_multiple
    return pipeline, np.array(draw(st.lists(TIMES, min_size=count, max_size=count)))


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 2), (4, 4), (4, 9), (8, 20)])
def test_equal_times_of_1f1b_take_the_closed_form(stages: int, count: int):
    """(m + p - 1)(f + b), with f and b of one stage."""
    assert makespan(Pipeline(stages), [3.0 * stages] * count) == pytest.approx(
        (count + stages - 1) * 3.0
    )


@pytest.mark.parametrize("virtual", [2, 3])
def test_equal_times_of_interleaved_1f1b_take_the_closed_form(virtual: int):
    """The bubble is (p - 1) / (m v); Narayanan et al. 2021, section 2.2."""
    stages, count = 4, 8
    assert makespan(Pipeline(stages, virtual), [3.0 * stages] * count) == pytest.approx(
        3.0 * (count + (stages - 1) / virtual)
    )


def test_passes_without_backward_fill_the_pipeline_once():
    assert makespan(Pipeline(4, backward=0.0), [4.0] * 5) == pytest.approx(5 + 3)


def test_transfers_overheads_and_shares_count():
    assert makespan(Pipeline(2, transfer=0.5), [6.0]) == pytest.approx(6.0 + 2 * 0.5)
    assert makespan(Pipeline(2, overhead=3.0), [6.0]) == pytest.approx(9.0)
    assert makespan(
        Pipeline(2, backward=0.0, stage_shares=(1.0, 3.0)), [4.0, 4.0]
    ) == pytest.approx(1 + 3 + 3)


def test_all_ranks_wait_for_the_heaviest():
    ranks = np.array([[1.0, 4.0], [2.0, 0.0]])
    assert makespan(Pipeline(2), ranks) == makespan(Pipeline(2), [4.0, 2.0])


@settings(max_examples=60)
@given(pipelines_with_times())
def test_no_pass_starts_before_what_it_waits_for_and_stages_do_one_at_a_time(
    case: tuple[Pipeline, np.ndarray],
):
    pipeline, times = case
    drawn = timeline(pipeline, times)
    passes = drawn.passes
    waits, close = passes.needed >= 0, 1e-9
    assert (
        drawn.starts[waits] >= (drawn.ends[passes.needed] + passes.sent)[waits] - close
    ).all()
    for stage in range(pipeline.stages):
        of_stage = passes.stage == stage
        assert (drawn.starts[of_stage][1:] >= drawn.ends[of_stage][:-1] - close).all()


@settings(max_examples=40)
@given(pipelines_with_times(), st.randoms(use_true_random=False))
def test_no_times_in_any_order_take_less_than_the_bound(
    case: tuple[Pipeline, np.ndarray], random
):
    pipeline, times = case
    if times.sum() == 0:
        return
    order = random.sample(range(len(times)), len(times))
    total, longest = float(times.sum()), float(times.max())
    bound = least_makespan(
        pipeline, len(times), total, total, most=longest, longest=longest
    )
    assert makespan(pipeline, times[order]) >= bound * (1 - 1e-9)


@settings(max_examples=40)
@given(pipelines_with_times())
def test_the_order_found_is_a_permutation_and_no_slower_than_the_heuristics(
    case: tuple[Pipeline, np.ndarray],
):
    pipeline, times = case
    order = fastest_order(pipeline, times, effort=20_000)
    assert sorted(order.tolist()) == list(range(len(times)))
    found = makespan(pipeline, times[order])
    for other in (times, times[small_ends(times)], np.sort(times)[::-1]):
        assert found <= makespan(pipeline, other) * (1 + 1e-9)


def test_the_order_found_is_the_best_of_all_for_few_micro_steps():
    times, pipeline = np.array([1.0, 5.0, 2.0, 2.5, 4.0, 0.5]), Pipeline(3)
    best = min(makespan(pipeline, times[list(order)]) for order in permutations(range(6)))
    assert makespan(pipeline, times[fastest_order(pipeline, times)]) == pytest.approx(best)


@pytest.mark.parametrize(
    ("pipeline", "steps"), [(Pipeline(4), 8), (Pipeline(2), 6), (Pipeline(4, 2), 8)]
)
def test_the_best_shape_is_near_the_bound_on_all_shapes(pipeline: Pipeline, steps: int):
    """And better than equal micro-steps, which a pipeline without virtual stages shows most."""
    shape = best_shape(pipeline, steps)
    assert shape.times.mean() == pytest.approx(1.0)
    assert makespan(pipeline, shape.times) == pytest.approx(shape.makespan)
    assert shape.bound <= shape.makespan <= 1.005 * shape.bound
    assert shape.makespan < 0.99 * makespan(pipeline, np.ones(steps))


def test_shapes_keep_their_limits():
    assert best_shape(Pipeline(4), 8, 1.1).times.max() <= 1.1 + 1e-9
    equal = best_shape(Pipeline(4), 8, 1.0)
    np.testing.assert_allclose(equal.times, 1.0)
    assert equal.bound == pytest.approx(8 / 4 + 3 / 4)
    assert best_shape(Pipeline(4), 8, np.inf, 3, 2.5).times[3] >= 2.5 - 1e-9


def test_a_forced_long_micro_step_raises_the_bound():
    free, forced = (
        least_makespan(Pipeline(4), 8, 8.0, 8.0),
        least_makespan(Pipeline(4), 8, 8.0, 8.0, longest=3.0),
    )
    assert forced > 1.05 * free


@pytest.mark.parametrize(
    ("times", "error", "said"),
    [
        ([], WeightError, "times has shape"),
        ([[[1.0]]], WeightError, "times has shape"),
        ([1.0, -1.0], WeightError, r"times\[1\] is -1.0"),
        ([1.0, float("nan")], WeightError, r"times\[1\] is nan"),
        ([1.0, 1.0, 1.0], CountError, "multiple of 2 micro-batches, got 3"),
    ],
)
def test_times_that_cannot_be_are_refused(times: list, error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        makespan(Pipeline(2, 2), times)
