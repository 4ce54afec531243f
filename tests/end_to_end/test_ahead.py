"""Samples that are made ahead of the steps that train on them, by a real engine during real updates.

One run, about 40 seconds. Only here does vLLM generate while ranks in processes of their own train: on
stand-ins of Ray one happens after the other.
"""

import itertools

import pytest

from controller.engines.staleness_schedule import Staleness
from tests.end_to_end.test_whole_loop import assert_engine_equals_saved_model, run_loop

pytestmark = pytest.mark.usefixtures("ray_session")


def test_samples_are_made_ahead_and_groups_without_signal_replaced(
    settings: list[str],
) -> None:
    """So far ahead that some of the first groups are left for the second step, however many have been
    replaced.

    The first step begins 25 groups. Of these it takes 5, and up to the second one at most 3 times 5 are
    replaced. Log-probs are from before the cut of the sampling, so that ratios to them are 1 at equal
    weights.
    """
    overrides = [*settings, "run.name=ahead", "run.steps=5", "rollout.samples_per_prompt=2"]
    overrides += ["rollout.max_staleness=4", "algorithm.zero_variance_groups=replace"]
    overrides += [
        "algorithm.max_sampling_rounds=4",
        "rollout.sampling.top_k=8",
        "rollout.sampling.top_p=0.9",
    ]
    run = run_loop(overrides)
    rollout = run.config.rollout
    schedule = Staleness(
        run.config.batch.prompts_per_step,
        rollout.max_staleness,
        rollout.out_of_order_window,
    )
    steps, bound = run.outcome.steps, schedule.max_age
    learned = [step["rollout/samples"] > step["rollout/samples_left_out"] for step in steps]
    assert ["policy/loss" in step for step in steps] == learned
    assert [step["rollout/weight_version"] for step in steps] == list(
        itertools.accumulate(learned)
    )
    assert set(run.versions) == {sum(learned)}
    assert learned[0]
    assert all(step["rollout/staleness_max"] <= bound for step in steps)
    assert steps[0]["rollout/staleness_max"] == 0 < steps[1]["rollout/staleness_max"]
    assert sum(step["rollout/samples_left_out"] for step in steps) > 0
    assert steps[0]["policy/rollout_mismatch_max"] <= 3e-5
    assert_engine_equals_saved_model(run)
