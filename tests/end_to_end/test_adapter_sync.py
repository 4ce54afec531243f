"""Runs with model.lora.sync=adapters: engines compute A and B of each update beside the base model.

Two runs, and one that begins with the adapters of another, about 40 seconds each. Only here are adapters of a
run in a real engine, and does one that starts late get them.
"""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.end_to_end import faults
from tests.end_to_end.faults import run_with, without_validation
from tests.end_to_end.test_whole_loop import assert_engine_equals_saved_model, run_loop

LORA = (
    "model.lora.rank=4",
    "model.lora.sync=adapters",
    "policy.optimizer.learning_rate=1e-2",
)
TOLERANCE = 3e-5  # float32, two implementations


def test_engines_follow_the_adapters_of_every_update(
    ray_session: None, settings: list[str]
) -> None:
    run = run_loop([*settings, *LORA, "run.name=adapters"])
    steps = run.outcome.steps
    assert [step["rollout/weight_version"] for step in steps] == [1.0, 2.0, 3.0]
    assert set(run.versions) == {3}
    assert max(step["policy/rollout_mismatch_max"] for step in steps) <= TOLERANCE
    assert_engine_equals_saved_model(run)
    adapters = load_file(run.folder / "adapters" / "adapter_model.safetensors")
    assert all(weight.abs().max() > 0 for weight in adapters.values())


@pytest.mark.slow
def test_ahead_of_the_steps_requests_continue_and_a_new_engine_gets_the_adapters(
    ray_session: None, settings: list[str]
) -> None:
    overrides = [
        *without_validation(settings),
        *LORA,
        "run.name=replaced",
        "rollout.replicas=2",
    ]
    overrides += ["rollout.threads=1", "run.steps=4"]
    run = run_with(overrides, {3: faults.kill_actor})
    assert run.last["restarts/engines"] == 1
    assert (
        max(step["policy/rollout_mismatch_max"] for step in run.outcome.steps) <= TOLERANCE
    )
    settings = [
        *settings,
        "run.steps=4",
        "rollout.max_staleness=2",
        "policy.max_mismatch=100",
    ]
    ahead = run_loop([*settings, *LORA, "run.name=ahead"])
    assert max(step["rollout/staleness_max"] for step in ahead.outcome.steps) > 0
    assert_engine_equals_saved_model(ahead)


@pytest.mark.slow
def test_a_run_begins_with_the_adapters_alone_that_another_left(
    ray_session: None, settings: list[str], tmp_path: Path
) -> None:
    """The first sends merged weights, the second adapters. The reference stays the base model."""
    settings = [
        *without_validation(settings),
        *LORA,
        "run.steps=2",
        "algorithm.loss.kl_coefficient=0.1",
    ]
    first = run_loop([*settings, "model.lora.sync=merged", "run.name=first"])
    began, ended = [step["policy/reference_kl"] for step in first.outcome.steps]
    adapters = shutil.move(first.folder / "adapters", tmp_path / "adapters")
    shutil.rmtree(first.folder)
    second = run_loop([*settings, f"model.lora.path={adapters}", "run.name=second"])
    steps = second.outcome.steps
    assert steps[0]["policy/reference_kl"] > ended > began
    assert max(step["policy/rollout_mismatch_max"] for step in steps) <= TOLERANCE
    assert_engine_equals_saved_model(second)
