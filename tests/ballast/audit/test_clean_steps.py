"""A clean step raises no alarm, whatever its algorithm, shape and precision."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ballast.audit.bundle import Algorithm, Bundle
from ballast.audit.checks import CHECKS, check_step
from ballast.audit.finding import Verdict
from tests.ballast.audit.steps import Recipe, clean_step


def alarms(bundle: Bundle) -> dict[str, str]:
    findings = check_step(bundle)
    return {
        finding.name: finding.cause
        for finding in findings
        if finding.verdict is Verdict.FAILED
    }


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


@pytest.mark.parametrize(
    ("removed", "verdict"),
    [
        (("old_logprobs",), Verdict.PASSED),
        (("old_logprobs", "mini_batch"), Verdict.UNKNOWN),
    ],
)
def test_log_probs_of_later_updates_are_not_held_against_the_sampler(
    removed: tuple[str, ...], verdict: Verdict
) -> None:
    """The weights of the second update are not the sampler's any more."""
    bundle = clean_step(mini_batches=2)
    tokens, rows = (
        {name: column for name, column in columns.items() if name not in removed}
        for columns in (bundle.tokens, bundle.rows)
    )
    findings = check_step(replace(bundle, tokens=tokens, rows=rows))
    verdicts = {finding.name: finding.verdict for finding in findings}
    assert verdicts["log_probs.sampler_and_trainer"] == verdict


recipes = st.builds(
    Recipe,
    seed=st.integers(0, 2**32 - 1),
    estimator=st.sampled_from(
        [
            "grpo",
            "grpo_population_std",
            "dr_grpo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "opo",
            "batch",
        ]
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
    noise=st.sampled_from([0.03, 0.04]),
    clip_low=st.sampled_from([0.2, 3e-4, 1.0]),
    clip_high=st.sampled_from([0.28, 4e-4, 4.0]),
    dual_clip=st.sampled_from([0.0, 3.0]),
    correction=st.sampled_from(["none", "token"]),
    kl_coefficient=st.sampled_from([0.0, 0.05]),
    binary_rewards=st.booleans(),
    drop_equal_groups=st.booleans(),
).filter(lambda recipe: recipe.groups * recipe.group_size > 1)


@settings(max_examples=120)
@example(Recipe(dual_clip=3.0, learning=0.6))  # ratios above 3
@given(recipes)
def test_a_clean_step_passes_every_check(recipe: Recipe) -> None:
    verdicts = {finding.name: finding.verdict for finding in check_step(clean_step(recipe))}
    assert verdicts == dict.fromkeys(CHECKS, Verdict.PASSED)


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
