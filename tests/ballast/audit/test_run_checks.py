"""Faults that only several steps show."""

from dataclasses import replace

import numpy as np
import pytest

from ballast.audit.bundle import Bundle
from ballast.audit.finding import Finding, Verdict
from ballast.audit.run_checks import check_run, summarise
from tests.ballast.audit.faults import with_facts, with_tokens
from tests.ballast.audit.steps import clean_step


def make_step(
    number: int, *, trainer: int, sampled: int, seed: int | None = None
) -> Bundle:
    bundle = clean_step(seed=number if seed is None else seed)
    versions = np.full(bundle.token_count, sampled)
    return with_facts(
        with_tokens(bundle, weight_versions=versions), step=number, weight_version=trainer
    )


def check(*steps: Bundle) -> dict[str, Finding]:
    return {
        finding.name: finding for finding in check_run([summarise(step) for step in steps])
    }


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_clean_runs_raise_no_alarm(staleness: int) -> None:
    steps = [make_step(n, trainer=n, sampled=max(n - staleness, 0)) for n in range(1, 9)]
    for count in (1, 2, 3, 8):
        findings = check(*steps[:count])
        assert len(findings) == (2 if count > 1 else 0)
        assert all(finding.verdict is Verdict.PASSED for finding in findings.values())


def test_weights_that_never_arrive_are_named() -> None:
    findings = check(*(make_step(n, trainer=n, sampled=0) for n in range(5)))
    assert findings["run.weights_arrive"].cause == "weights_never_arrive"
    assert findings["run.new_samples"].verdict is Verdict.PASSED


def test_a_step_that_is_trained_again_is_named() -> None:
    steps = [make_step(n, trainer=n, sampled=n, seed=min(n, 2)) for n in range(4)]
    finding = check(*steps)["run.new_samples"]
    assert finding.cause == "step_repeated"
    assert "step 3 are those of step 2" in finding.text


def test_what_a_run_lacks_is_named() -> None:
    steps = [
        with_facts(make_step(n, trainer=n, sampled=n), weight_version=None)
        for n in range(3)
    ]
    assert check(*steps)["run.weights_arrive"].missing == "weight_version"
    bare = []
    for step in steps:
        tokens = {name: step.tokens[name] for name in ("token_ids", "loss_mask")}
        bare.append(replace(step, tokens=tokens))
    assert check(*bare)["run.new_samples"].missing == "sampler_logprobs"
