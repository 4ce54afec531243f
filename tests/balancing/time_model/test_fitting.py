"""Fits find the machine that made the measurements, and keep what these do not show."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from balancing.time_model import (
    MACHINES,
    Efficiency,
    Layout,
    ModelShape,
    Workload,
    step_time,
)
from balancing.time_model.fitting import Measured, fit
from balancing.time_model.generation import generation
from balancing.time_model.machine import SPREADS
from balancing.time_model.step_time import transfer_terms
from balancing.time_model.training import micro_step_terms, sharding_seconds

LAYOUT = Layout(
    dp=1,
    engines=1,
    gpus_per_node=2,
    placement="shared_memory",
    dtype="float32",
    compiled=False,
)
LAYOUT = replace(LAYOUT, engine_gib=1.0)
STATED = MACHINES["cpu"]
REAL = replace(
    STATED,
    kernel=3e-5,
    micro_batch=0.05,
    engine_step=6e-3,
    engine_layer=2e-4,
    engine_sequence=1e-4,
)
REACHED = Efficiency(matmul=0.5, attention=0.2, elementwise=0.4, decode=0.3, prefill=0.7)


def model(width: int, layers: int) -> ModelShape:
    return ModelShape.from_model_config(
        {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": width * 11 // 4,
            "vocab_size": 64,
            "tie_word_embeddings": True,
        }
    )


def work(seed: int, samples: int = 64) -> Workload:
    rng = np.random.default_rng(seed)
    return Workload([50] * samples, np.minimum(200, rng.geometric(1 / 64, samples)))


def run_of(shape: ModelShape, *, noise: float = 0.0) -> Measured:
    """What the real machine would show."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(200, 4000, 40).astype(float)
    squared = tokens * rng.integers(50, 400, 40)
    terms = np.stack(micro_step_terms(shape, LAYOUT, REAL, tokens, squared), axis=1)
    values = [
        1 / REACHED.matmul,
        1 / REACHED.attention,
        1 / REACHED.elementwise,
        REAL.kernel,
        REAL.micro_batch,
    ]
    seconds = terms @ np.array(values) * rng.normal(1, noise, 40)
    made = [
        (work(seed), generation(shape, LAYOUT, work(seed), REAL, REACHED))
        for seed in range(10)
    ]
    generations = [(each, found.prefill + found.decode) for each, found in made]
    return Measured(
        shape,
        LAYOUT,
        np.stack([tokens, squared, seconds], axis=1),
        generations,
        [0.3] * 5,
        [0.5] * 5,
    )


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_two_sizes_predict_a_third(noise: float) -> None:
    machine, efficiency = fit(
        [run_of(model(128, 4), noise=noise), run_of(model(384, 8), noise=noise)], STATED
    )
    between = model(256, 6)
    real, said = (
        step_time(between, LAYOUT, work(99), *each)
        for each in ((REAL, REACHED), (machine, efficiency))
    )
    for name in ("update", "decode"):
        assert said.phases[name].seconds == pytest.approx(
            real.phases[name].seconds, rel=0.1
        )
    assert efficiency.spread["training"] == pytest.approx(0.1, abs=0.02)
    assert {
        name for name, error in efficiency.spread.items() if error != SPREADS[name]
    } == {
        "training",
        "generation",
        "overheads",
    }


def test_one_size_predicts_itself() -> None:
    shape = model(256, 6)
    machine, efficiency = fit([run_of(shape)], STATED)
    said, real = (
        step_time(shape, LAYOUT, work(7), *each)
        for each in ((machine, efficiency), (REAL, REACHED))
    )
    assert said.phases["update"].seconds == pytest.approx(
        real.phases["update"].seconds, rel=0.05
    )
    sampled, expected = (
        sum(each.phases[name].seconds for name in ("prefill", "decode"))
        for each in (said, real)
    )
    assert sampled == pytest.approx(expected, rel=0.05)
    assert said.phases["transfer"].seconds == pytest.approx(0.3, rel=0.1)


def test_transfers_of_flat_and_wide_models_predict_a_deep_one() -> None:
    """Seconds are of weights, as on a CPU, and of bytes."""
    shapes = [model(128, 12), model(256, 12), model(512, 4)]
    real = replace(REAL, transfer=0.05, weight=1.2e-3, host=1.2)

    def seconds(shape: ModelShape, *found: Any) -> float:
        return step_time(shape, LAYOUT, work(3), *found).phases["transfer"].seconds

    runs = [
        Measured(
            each, LAYOUT, np.zeros((0, 3)), (), [seconds(each, real, Efficiency())] * 4
        )
        for each in shapes
    ]
    found = fit(runs, STATED)
    for shape in (model(128, 6), model(512, 7), model(512, 16)):
        assert seconds(shape, *found) == pytest.approx(
            seconds(shape, real, Efficiency()), rel=0.1
        )


def test_what_no_run_shows_stays_as_stated() -> None:
    nothing = Measured(model(256, 6), LAYOUT, np.zeros((0, 3)))
    assert fit([nothing], STATED) == (STATED, Efficiency())


def test_two_ranks_show_the_links_and_the_contention_of_cpus() -> None:
    """Transfers show links, because micro-steps are slower for several reasons."""
    shape, two = model(256, 6), replace(LAYOUT, dp=2)
    real, reached = replace(REAL, contention=1.4, latency=1e-3), replace(REACHED, link=0.35)
    alone = run_of(shape)
    sent, latency = sharding_seconds(shape, two, real, 2, 1)
    seconds = alone.micro_steps[:, 2] * real.contention + sent / reached.link + latency
    slower = np.stack([*alone.micro_steps.T[:2], seconds], axis=1)
    transfers = [
        0.3
        + float(
            np.dot(transfer_terms(shape, two, real)[3:], (real.latency, 1 / reached.link))
        )
    ] * 5
    machine, efficiency = fit([alone, Measured(shape, two, slower, (), transfers)], STATED)
    assert machine.contention == pytest.approx(real.contention, rel=0.05)
    said, expected = (
        step_time(shape, two, work(5), *each).phases
        for each in ((machine, efficiency), (real, reached))
    )
    for name in ("update", "collectives"):
        assert said[name].seconds == pytest.approx(expected[name].seconds, rel=0.15)
    assert said["transfer"].seconds == pytest.approx(transfers[0], rel=0.05)


def test_a_run_without_a_quiet_role_keeps_the_stated_contention() -> None:
    shape, two = model(256, 6), replace(LAYOUT, dp=2)
    found = run_of(shape)
    machine, efficiency = fit([Measured(shape, two, found.micro_steps)], STATED)
    assert machine.contention == STATED.contention
    terms = np.stack(
        micro_step_terms(shape, two, machine, *found.micro_steps.T[:2]), axis=1
    )
    values = [
        1 / efficiency.matmul,
        1 / efficiency.attention,
        1 / efficiency.elementwise,
        machine.kernel,
    ]
    waits = sharding_seconds(shape, two, machine, 2, 1)
    said = (
        machine.contention * (terms @ [*values, machine.micro_batch])
        + waits[0] / efficiency.link
        + waits[1]
    )
    assert np.median(said / found.micro_steps[:, 2]) == pytest.approx(1, rel=0.1)
