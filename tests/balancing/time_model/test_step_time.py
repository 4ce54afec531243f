"""The step's seconds: counts, schedules, and what more hardware does."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancing.errors import OptionError
from balancing.time_model import (
    MACHINES,
    Efficiency,
    Layout,
    ModelShape,
    Workload,
    machine_named,
    step_time,
)
from balancing.time_model.training import (
    OF_GATHER,
    OF_OPTIMIZER,
    layer_parameters,
    shares,
    training,
)
from tests.balancing.published_models import PUBLISHED, QWEN3_30B_A3B
from tests.balancing.time_model.shapes import SHAPE

H100 = MACHINES["H100"]
ON_CPUS = {"placement": "shared_memory"}


def work(samples: int = 256, seed: int = 0) -> Workload:
    rng = np.random.default_rng(seed)
    return Workload(
        np.repeat(rng.integers(50, 500, samples // 8), 8), rng.integers(1, 4000, samples)
    )


def test_parameters_are_those_of_the_published_models() -> None:
    assert SHAPE.parameters == pytest.approx(7.61e9, rel=0.005)
    moe = ModelShape.from_model_config(QWEN3_30B_A3B)
    assert moe.parameters == pytest.approx(30.5e9, rel=0.005)
    # The embedding is not read.
    assert moe.active + moe.hidden * moe.vocabulary == pytest.approx(3.35e9, rel=0.01)
    assert SHAPE.kv == 28 * 2 * 4 * 128


def test_hybrids_and_windows_take_less_attention_and_memory_of_engines() -> None:
    hybrid = ModelShape.from_model_config(PUBLISHED["Qwen3-Next-80B-A3B"].config)
    assert hybrid.parameters == pytest.approx(79.7e9, rel=0.01)
    assert (
        hybrid.kept(1000) == 12 * 2 * 2 * 256 * 1000 + PUBLISHED["Qwen3-Next-80B-A3B"].state
    )
    windowed = ModelShape.from_model_config(PUBLISHED["Gemma-3-4B"].config)
    of_a_token = 2 * 4 * 256
    assert windowed.kept(np.array([1000.0, 5000.0])).tolist() == [
        34 * of_a_token * 1000,
        5 * of_a_token * 5000 + 29 * of_a_token * 1024,
    ]
    long = Workload([0] * 8, [8192] * 8, samples_per_prompt=1)
    unlimited = replace(windowed, windows=())
    part, whole = (
        shares(Layout(max_tokens=8192), long, shape.windows)
        for shape in (windowed, unlimited)
    )
    assert part.tokens == whole.tokens
    assert part.squared == pytest.approx(whole.squared * (1 - 29 / 34 * (7 / 8) ** 2))


def test_without_staleness_the_phases_add_up() -> None:
    found = step_time(SHAPE, Layout(dp=8, engines=8), work(), H100)
    assert found.seconds == pytest.approx(
        sum(phase.seconds for phase in found.phases.values())
    )
    assert found.step.low < found.seconds < found.step.high
    assert all(phase.low <= phase.seconds <= phase.high for phase in found.phases.values())


@given(st.integers(0, 3), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_better_hardware_is_never_slower(staleness: int, dp: int, engines: int) -> None:
    layout = Layout(dp=dp, engines=engines, placement="apart", staleness=staleness)
    before = step_time(SHAPE, layout, work(), H100).seconds
    for name in ("tflops", "bandwidth", "link", "network"):
        better = replace(H100, **{name: 2 * getattr(H100, name)})
        assert step_time(SHAPE, layout, work(), better).seconds <= before * (1 + 1e-9)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_staleness_never_slows_a_step_down(dp: int, engines: int) -> None:
    layout = Layout(dp=dp, engines=engines, placement="apart")
    times = [
        step_time(SHAPE, replace(layout, staleness=each), work(), H100) for each in range(4)
    ]
    # Younger groups keep the batch large, so that the slowest group takes a little longer.
    assert all(
        later.seconds <= earlier.seconds * 1.05 for earlier, later in pairwise(times)
    )
    assert all(0 <= each.trainer_idle <= 1 and 0 <= each.engine_idle <= 1 for each in times)


def test_a_prompt_counts_once_in_each_part_of_a_group() -> None:
    group = Workload([1000] * 8, [500] * 8)
    whole = shares(Layout(max_tokens=10**6), group)
    assert whole.tokens == 1000 + 8 * 500
    assert whole.squared == 8 * 1500**2 - 7 * 1000**2
    assert shares(Layout(max_tokens=2500), group).tokens == 2 * 1000 + 8 * 500
    assert shares(Layout(shared_prompts=False), group).tokens == 8 * 1500
    assert (
        shares(
            Layout(dp=8, shared_prompts=False), Workload([10] * 8, [1000, *[1] * 7])
        ).tokens
        == 1010
    )


def test_an_update_takes_the_time_of_its_products() -> None:
    machine = replace(H100, bandwidth=1e12, kernel=0.0, micro_batch=0.0)
    layout, one = (
        Layout(dp=1, engines=1, shared_prompts=False),
        Workload([100] * 8, [100] * 8),
    )
    found = training(SHAPE, layout, one, machine, Efficiency(matmul=1.0, attention=1.0))
    products, scores = 2 * SHAPE.active * 1600, SHAPE.attention * 8 * 200**2
    flops = 3 * (products + scores)
    assert found.update == pytest.approx(flops / 989.4e12, rel=1e-3)
    assert found.collectives == 0.0
    recomputing = replace(layout, recomputed=1.0)
    assert training(
        SHAPE, recomputing, one, machine, Efficiency(matmul=1.0, attention=1.0)
    ).update == pytest.approx(flops * 4 / 3 / 989.4e12, rel=1e-3)
    frozen = replace(SHAPE, trained=1.0)
    assert training(
        frozen, layout, one, machine, Efficiency(matmul=1.0, attention=1.0)
    ).update == pytest.approx((2 * products + 3 * scores) / 989.4e12, rel=1e-3)
    assert training(
        SHAPE, layout, one, H100, Efficiency(elementwise=1.0)
    ).optimizer == pytest.approx(SHAPE.parameters * OF_OPTIMIZER / 3350e9)


@pytest.mark.parametrize(("updates", "gathers"), [(1, 7), (2, 6)])
def test_a_gpu_alone_gathers_freed_layers_twice_a_micro_batch(
    updates: int, gathers: int
) -> None:
    """Of 4 micro-batches in one update or two: 8 gathers of each layer, against one an update."""
    four = Workload([0] * 4, [1000] * 4, samples_per_prompt=1, updates=updates)
    layout = Layout(max_tokens=1053, shared_prompts=False, reshard_after_forward=False)
    assert shares(layout, four).micro_batches == 4
    freed = replace(layout, reshard_after_forward=True)
    kept, again = (
        training(SHAPE, option, four, H100, Efficiency()).update
        for option in (layout, freed)
    )
    moved = gathers * OF_GATHER * layer_parameters(SHAPE, layout)
    assert again - kept == pytest.approx(moved / (3350e9 * Efficiency().elementwise))
    for other in ({"dp": 2}, {"cp": 2}, {"dtype": "float32"}, ON_CPUS):
        kept, again = (
            training(SHAPE, replace(option, **other), four, H100, Efficiency()).update
            for option in (layout, freed)
        )
        assert again == kept


def test_layers_have_all_parameters_but_those_of_words() -> None:
    words = 2 * SHAPE.vocabulary * SHAPE.hidden
    assert layer_parameters(SHAPE, Layout()) == SHAPE.parameters - words
    assert layer_parameters(SHAPE, Layout(tp=2, pp=2)) == (SHAPE.parameters - words) / 4


def test_collectives_beyond_a_node_take_the_network() -> None:
    assert H100.bus(8, 8) == 450e9
    assert H100.bus(16, 8) == 400e9
    assert H100.bus(2, 1) == 50e9


def test_a_custom_machine_has_its_own_figures() -> None:
    assert machine_named("custom", tflops=500.0).flops("bfloat16") == 500e12
    assert machine_named("A100") == MACHINES["A100"]
    with pytest.raises(OptionError, match="gpu=T4"):
        machine_named("T4")


@pytest.mark.parametrize(("staleness", "faster"), [(1, 1.91), (2, 2.77), (3, 3.84)])
def test_staleness_gains_what_the_simulated_schedule_gains(
    staleness: int, faster: float
) -> None:
    """docs/schedule-benchmark.md: 4 engines of 64 samples, a trainer of 14,000 tokens/s, the window 0.3."""
    rng = np.random.default_rng(0)
    simulated = Workload(
        np.zeros(256, int),
        np.minimum(16384, 1 + rng.lognormal(np.log(1500), 1.0, 256)).astype(int),
    )
    rate = 14_000 * 3 * 2 * SHAPE.active / 1e12
    machine = replace(
        machine_named("H100", tflops=rate, bandwidth=1e9, link=1e9, network=1e9),
        engine_step=0.012, engine_layer=0.0, engine_sequence=0.00012, transfer=1.0, phase=0.0, kernel=0.0,
        micro_batch=0.0,
    )  # fmt: skip
    efficiency = Efficiency(matmul=1.0, attention=1e6, prefill=1e6)
    layout = Layout(
        placement="apart",
        engines=4,
        max_concurrent=64,
        engine_gib=1e6,
        shared_prompts=False,
    )
    before, after = (
        step_time(SHAPE, replace(layout, staleness=each), simulated, machine, efficiency)
        for each in (0, staleness)
    )
    assert before.phases["update"].seconds == pytest.approx(
        simulated.tokens / 14_000, rel=0.01
    )
    assert before.seconds / after.seconds == pytest.approx(faster, rel=0.15)
