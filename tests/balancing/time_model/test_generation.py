"""The simulation of engines against one engine step at a time."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancing.time_model import MACHINES, Efficiency, Layout, ModelShape, Workload
from balancing.time_model.generation import (
    _starts,
    batches,
    engine_step,
    generation,
    slots_of,
)
from tests.balancing.time_model.shapes import SHAPE

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def step_by_step(
    prompts: list[int], responses: list[int], slots: int
) -> list[tuple[int, int]]:
    """Running requests and their tokens in every engine step, in which each finished one makes room for the
    next.
    """
    waiting, running, found = deque(zip(prompts, responses, strict=True)), [], []
    while waiting or running:
        while waiting and len(running) < slots:
            prompt, left = waiting.popleft()
            running.append([prompt, left])
        found.append((len(running), sum(tokens for tokens, _ in running)))
        running = [[tokens + 1, left - 1] for tokens, left in running if left > 1]
    return found


@given(lengths, st.integers(1, 30))
def test_batches_are_those_of_an_engine_that_samples_one_token_at_a_time(
    responses: list[int], slots: int
) -> None:
    work = Workload([7] * len(responses), responses, samples_per_prompt=1)
    prompts, starts, ends, weight = _starts(work, 1, slots)
    assert weight == 1.0
    order = [int(end - start) for start, end in zip(starts, ends, strict=True)]
    every = step_by_step([int(tokens) for tokens in prompts], order, slots)
    steps, running, tokens = batches(work, 1, slots)
    assert steps.sum() == len(every)
    assert running.max() <= slots
    assert np.repeat(running, steps.astype(int)).tolist() == [batch for batch, _ in every]
    # `tokens` is the mean over the steps of a stretch, of the middle of each step
    assert float(steps @ tokens) == pytest.approx(
        sum(total + batch / 2 for batch, total in every)
    )


@given(lengths, st.integers(1, 4))
def test_the_engine_with_the_longest_response_is_simulated(
    responses: list[int], engines: int
) -> None:
    _, starts, ends, _ = _starts(
        Workload([1] * len(responses), responses, samples_per_prompt=1), engines, 1000
    )
    assert (ends - starts).max() == max(responses)
    assert len(starts) == -(-len(responses) // engines)


def test_requests_beyond_the_limit_stand_for_several() -> None:
    rng = np.random.default_rng(1)
    work = Workload([100] * 4096, rng.integers(1, 2000, 4096), samples_per_prompt=8)
    steps, running, _ = batches(work, 1, 256)
    assert float(steps @ running) == pytest.approx(work.responses.sum(), rel=0.01)
    assert running.max() <= 256


def test_an_engine_step_reads_weights_and_keys_once() -> None:
    machine, layout = MACHINES["H100"], Layout(engine_tp=2)
    model = (SHAPE, layout, machine, Efficiency(decode=0.5))
    weights, read, flops, _ = engine_step(*model, np.array([8.0]), np.array([8000.0]))
    assert float(weights[0]) == pytest.approx(SHAPE.parameters * 2 / (3350e9 * 0.5 * 2))
    assert float(read[0]) == pytest.approx(8000 * SHAPE.kv * 2 / (3350e9 * 0.5 * 2))
    assert float(flops[0]) == pytest.approx(8 * 2 * SHAPE.active / (989.4e12 * 0.5 * 2))


def test_experts_are_read_as_far_as_a_batch_uses_them() -> None:
    shape = ModelShape(
        2,
        64,
        100,
        1000.0,
        300.0,
        8.0,
        16,
        experts=10,
        experts_active=1,
        expert_parameters=800.0,
    )
    model = (shape, Layout(), MACHINES["H100"], Efficiency(decode=1.0))
    one, many = engine_step(*model, np.array([1.0, 1000.0]), np.zeros(2))[0].tolist()
    assert one == pytest.approx((1000 - 0.9 * 800) * 2 / 3350e9)
    assert many == pytest.approx(1000 * 2 / 3350e9)


def test_memory_limits_the_requests_of_an_engine() -> None:
    work = Workload([512] * 64, [1024] * 64)
    held = (SHAPE.parameters * 2 + 10.5 * SHAPE.kv * 2 * (512 + 512 / 8)) / 2**30
    assert slots_of(SHAPE, Layout(engine_gib=held), work) == 10
    assert slots_of(SHAPE, Layout(engine_gib=70.0, max_concurrent=48), work) == 48


def test_a_group_is_read_once_by_whole_blocks() -> None:
    machine, layout = MACHINES["H100"], Layout(engines=1)
    alone = generation(
        SHAPE,
        layout,
        Workload([40] * 8, [10] * 8, samples_per_prompt=1),
        machine,
        Efficiency(),
    )
    shared = generation(
        SHAPE,
        layout,
        Workload([40] * 8, [10] * 8, samples_per_prompt=8),
        machine,
        Efficiency(),
    )
    assert shared.prefill / alone.prefill == pytest.approx((8 * 40 - 7 * 32) / (8 * 40))
