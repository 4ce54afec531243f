"""Runs whose frozen weights and optimiser states are rounded, with a real engine.

Two tests, about two minutes. Only here does an engine serve rounded weights with merged adapters.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.end_to_end.faults import (
    RunWithFaults,
    differences,
    without_validation,
)
from tests.end_to_end.test_whole_loop import Run, assert_engine_equals_saved_model, run_loop
from workers.model.low_bit_linear import dequantize, quantize

LORA = ("model.lora.rank=4", "policy.optimizer.learning_rate=1e-2")
TOLERANCE = 3e-5  # float32, two implementations
BELOW_ADAPTER = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.slow
def test_a_run_on_nf4_resumes_as_if_it_had_not_stopped(
    ray_session: None, settings: list[str], workspace: Path
) -> None:
    settings = [*without_validation(settings), *LORA, "model.base_dtype=nf4"]
    undisturbed = run_loop([*settings, "run.name=nf4-whole"])
    assert_engine_serves_trained_model(undisturbed, steps=3)
    stopping = [*settings, "run.name=nf4-stopped", "run.checkpoint_every=1"]
    run_loop([*stopping, "run.steps=2"])
    resumed = run_loop([*stopping, "run.resume=auto"])
    assert_engine_serves_trained_model(resumed, steps=1)
    runs = [RunWithFaults(run.config, run.outcome) for run in (resumed, undisturbed)]
    assert differences(*runs) == []
    adapters = load_file(undisturbed.folder / "adapters" / "adapter_model.safetensors")
    again = load_file(resumed.folder / "adapters" / "adapter_model.safetensors")
    torch.testing.assert_close(again, adapters, rtol=0, atol=1e-4)
    card = (resumed.folder / "model" / "README.md").read_text()
    assert "rounded to nf4 for training" in card
    assert_base_is_rounded(resumed, workspace, "nf4")


@pytest.mark.slow
def test_a_run_with_states_and_base_weights_in_int8_serves_what_it_saves(
    ray_session: None, settings: list[str], workspace: Path
) -> None:
    low_bits = ("model.base_dtype=int8", "policy.optimizer.state_dtype=int8")
    run = run_loop([*without_validation(settings), *LORA, *low_bits, "run.name=int8"])
    assert_engine_serves_trained_model(run, steps=3)
    assert (
        "rounded to int8 for training" in (run.folder / "model" / "README.md").read_text()
    )
    assert_base_is_rounded(run, workspace, "int8")


def assert_engine_serves_trained_model(run: Run, steps: int) -> None:
    """Engine and trainer agree in each of the last steps, and at the end with the saved model."""
    metrics = run.outcome.steps
    versions = [step["rollout/weight_version"] for step in metrics]
    assert versions == [1.0, 2.0, 3.0][-steps:]
    assert max(step["policy/rollout_mismatch_max"] for step in metrics) <= TOLERANCE
    assert min(step["policy/grad_norm"] for step in metrics) > 0
    assert set(run.versions) == {3}
    assert_engine_equals_saved_model(run)


def assert_base_is_rounded(run: Run, workspace: Path, base_dtype: str) -> None:
    """The saved weight is the rounded one of the files, and the product of its adapters."""
    weight = load_file(workspace / "model" / "model.safetensors")[BELOW_ADAPTER]
    base = dequantize(*quantize(weight, base_dtype))
    assert not torch.equal(base, weight)
    adapters = load_file(run.folder / "adapters" / "adapter_model.safetensors")
    scale = run.config.model.lora.alpha / run.config.model.lora.rank
    update = scale * adapter(adapters, "lora_B") @ adapter(adapters, "lora_A")
    saved = load_file(run.folder / "model" / "model.safetensors")[BELOW_ADAPTER]
    torch.testing.assert_close(saved, base + update, rtol=0, atol=1e-6)
    assert update.abs().max() > 1e-3


def adapter(adapters: dict[str, Tensor], name: str) -> Tensor:
    module = BELOW_ADAPTER.removesuffix("weight")
    return adapters[f"base_model.model.{module}{name}.weight"]
