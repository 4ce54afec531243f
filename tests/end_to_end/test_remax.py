"""ReMax on real engines: a greedy response to each prompt is the baseline."""

import math

import pytest

from tests.end_to_end.test_whole_loop import run_loop


@pytest.mark.slow
def test_remax_compares_with_a_greedy_response(ray_session, settings: list[str]) -> None:
    overrides = [*settings, "run.name=remax", "run.steps=2", "algorithm.advantage=remax", "policy.ranks=1"]
    overrides += [
        "rollout.samples_per_prompt=1",
        "batch.prompts_per_step=8",
        "data.validation=''",
        "validation.prompts=0",
    ]
    steps = run_loop(overrides).outcome.steps
    for step in steps:
        assert step["rollout/samples"] == 8
        assert 0 <= step["reward/greedy"] <= 1
        assert math.isfinite(step["policy/loss"])
    assert any(step["reward/greedy"] != step["reward/mean"] for step in steps)
