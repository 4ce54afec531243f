"""A clean step raises no alarm, whatever its algorithm, shape and precision."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.audit.bundle import Algorithm, Bundle
from ballast.audit.checks import CHECKS, check_step
from ballast.audit.finding import Verdict
from tests.ballast.audit.steps import Recipe, clean_step

RUNS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo in bfloat16": {"precision": "bfloat16"},
    "grpo of binary rewards": {"binary_rewards": True, "precision": "bfloat16"},
    "dapo": {"binary_rewards": True, "drop_equal_groups": True, "clip_high": 0.28},
    "dr_grpo": {"estimator": "dr_grpo", "aggregation": "sequence_mean_token_sum_norm"},
    "rloo": {
        "estimator": "rloo",
        "aggregation": "sequence_mean_token_sum",
        "loss": "reinforce",
    },
    "reinforce_plus_plus": {"estimator": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {
        "estimator": "reinforce_plus_plus_baseline",
        "precision": "bfloat16",
    },
    "population": {"estimator": "grpo_population_std"},
    "batch": {"estimator": "batch"},
    "opo": {"estimator": "opo"},
    "gspo": {
        "loss": "gspo",
        "aggregation": "sequence_mean_token_mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "kl": {"kl_coefficient": 0.04},
    "corrected": {"correction": "token", "precision": "bfloat16"},
    "dual clip": {"dual_clip": 3.0, "learning": 0.6},
    "several turns": {"turns": 3, "precision": "bfloat16"},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.3, "precision": "bfloat16"},
    "one mini-batch": {"mini_batches": 1, "group_size": 16, "groups": 2},
    "groups of two": {"group_size": 2, "groups": 20, "binary_rewards": True},
    "far from the sampler": {"noise": 0.04, "precision": "bfloat16", "longest": 8},
}


def alarms(bundle: Bundle) -> dict[str, str]:
    findings = check_step(bundle)
    return {
        finding.name: finding.cause
        for finding in findings
        if finding.verdict is Verdict.FAILED
    }


@pytest.mark.parametrize("run", RUNS)
def test_a_clean_step_passes_every_check(run: str) -> None:
    for seed in range(3):
        findings = check_step(clean_step(seed=seed, **RUNS[run]))
        failed = [finding for finding in findings if finding.verdict is Verdict.FAILED]
        assert {finding.name: finding.cause for finding in failed} == {}
        unknown = [
            finding.name for finding in findings if finding.verdict is Verdict.UNKNOWN
        ]
        assert unknown == []


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_no_gradient_is_no_alarm_where_every_ratio_is_clipped(loss: str) -> None:
    bundle = clean_step(loss=loss, clip_low=0.2, clip_high=0.2)
    mask = bundle.tokens["loss_mask"].astype(bool)
    moved = np.where(
        mask, bundle.tokens["old_logprobs"] + np.sign(bundle.tokens["advantages"]), 0
    )
    facts = replace(bundle.facts, gradient_norm=(0.0,))
    clipped = replace(
        bundle, tokens=dict(bundle.tokens) | {"new_logprobs": moved}, facts=facts
    )
    unclipped = replace(bundle, facts=facts)
    assert "loss.gradient_norm" not in alarms(clipped)
    assert alarms(unclipped)["loss.gradient_norm"] == "zero_gradient"


recipes = st.builds(
    Recipe,
    seed=st.integers(0, 2**32 - 1),
    estimator=st.sampled_from(
        ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "opo", "batch"]
    ),
    loss=st.sampled_from(["ppo_clip", "reinforce", "cispo", "gspo"]),
    aggregation=st.sampled_from(
        [
            "token_mean",
            "sequence_mean_token_mean",
            "sequence_mean_token_sum",
            "sequence_mean_token_sum_norm",
        ]
    ),
    groups=st.integers(1, 12),
    group_size=st.integers(1, 9),
    turns=st.integers(1, 3),
    longest=st.integers(6, 60),
    mini_batches=st.integers(1, 3),
    precision=st.sampled_from(["float32", "bfloat16"]),
    temperature=st.sampled_from([0.5, 1.0, 1.4]),
    kl_coefficient=st.sampled_from([0.0, 0.05]),
    binary_rewards=st.booleans(),
    drop_equal_groups=st.booleans(),
)


@settings(max_examples=60)
@given(recipes)
def test_no_clean_step_raises_an_alarm(recipe: Recipe) -> None:
    assert alarms(clean_step(recipe)) == {}


@settings(max_examples=60)
@given(recipes, st.data())
def test_a_missing_column_or_setting_is_named_and_raises_no_alarm(
    recipe: Recipe, data: st.DataObject
) -> None:
    bundle = clean_step(recipe)
    names = sorted({*bundle.tokens, *bundle.rows} - {"token_ids", "loss_mask"})
    removed = data.draw(st.sets(st.sampled_from(names)))
    if recipe.drop_equal_groups:
        removed -= {"trained"}  # without it, all rows are trained
    tokens = {name: column for name, column in bundle.tokens.items() if name not in removed}
    rows = {name: column for name, column in bundle.rows.items() if name not in removed}
    bundle = replace(bundle, tokens=tokens, rows=rows)
    if data.draw(st.booleans()):
        bundle = replace(bundle, facts=replace(bundle.facts, algorithm=Algorithm()))
    assert alarms(bundle) == {}
    findings = check_step(bundle)
    assert [finding.name for finding in findings] == list(CHECKS)
    for finding in findings:
        assert bool(finding.missing) == (finding.verdict is Verdict.UNKNOWN)
