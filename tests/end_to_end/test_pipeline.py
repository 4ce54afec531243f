"""A policy and its reference in stages, from their configuration: real vLLM, and a resume on ranks without stages."""

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.test_whole_loop import run_loop

RATE = "policy.optimizer.learning_rate=1e-3"


def test_a_run_in_stages_hands_on_its_weights_and_goes_on_without_stages(ray_session, settings: list[str]) -> None:
    """Two stages of two parts each; the mismatch of each step is that between the engine's weights of this version and
    the stages' own."""
    common = [*settings, RATE, "batch.mini_batches=2", "algorithm.loss.kl_coefficient=0.1", "run.steps=2"]
    common += ["data.validation=''", "validation.prompts=0", "run.checkpoint_every=1"]
    cut = ["policy.ranks=1", "policy.parallel.pipeline_parallel=2", "policy.parallel.virtual_stages=2"]
    staged = run_loop([*common, "run.name=staged", *cut])
    assert [step["rollout/weight_version"] for step in staged.outcome.steps] == [1.0, 2.0]
    assert all(step["policy/rollout_mismatch_max"] <= 3e-5 for step in staged.outcome.steps)
    assert 0 < staged.outcome.steps[0]["policy/reference_kl"] < staged.outcome.steps[1]["policy/reference_kl"]
    begin = staged.folder / "checkpoints"
    again = run_loop([*common, "run.name=whole", f"run.resume={begin / 'policy' / 'step-1'}"])
    (second,) = again.outcome.steps
    for name in ("policy/loss", "policy/grad_norm", "policy/reference_kl", "reward/mean"):
        assert second[name] == pytest.approx(staged.outcome.steps[1][name], abs=1e-6), name
    first, last = (load_file(run.folder / "model" / "model.safetensors") for run in (staged, again))
    assert first.keys() == last.keys()
    for name, weight in first.items():
        torch.testing.assert_close(last[name], weight, rtol=0, atol=1e-5)
