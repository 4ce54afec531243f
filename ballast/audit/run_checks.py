"""Checks over the steps of a run: weights reach the sampler, and no step is trained again.

Bundle of each step --summarise--> versions, digests of rows --check_run--> findings
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ballast.audit.bundle import Bundle, MissingError
from ballast.audit.finding import Finding, Problem, failed, passed, unknown
from ballast.audit.token_sums import loss_tokens

FEWEST_UPDATES = 3
"""Updates of the trainer after which a sampler of old weights is a fault. Asynchronous ones lag by fewer."""
MOST_REPEATED = 0.5


@dataclass(frozen=True)
class StepSummary:
    """trainer_version: of the weights when the step began, None if unknown. sampled_version: the newest among
    its tokens. digests: of each row's ids and log-probs, None without log-probs.
    """

    step: int
    trainer_version: int | None
    sampled_version: int | None
    digests: frozenset[bytes] | None


def summarise(bundle: Bundle) -> StepSummary:
    sampled_version = None
    if bundle.has("weight_versions"):
        newest = [_newest_version(part) for _, part in bundle.parts()]
        sampled_version = max(newest, default=-1)
    digests = frozenset(_row_digests(bundle)) if bundle.has("sampler_logprobs") else None
    return StepSummary(
        bundle.facts.step, bundle.facts.weight_version, sampled_version, digests
    )


def _newest_version(part: Bundle) -> int:
    versions = part.token_column("weight_versions")[loss_tokens(part)]
    return int(versions.max(initial=-1))


def _row_digests(bundle: Bundle) -> list[bytes]:
    digests = []
    for start, end in zip(bundle.offsets[:-1], bundle.offsets[1:], strict=True):
        digest = hashlib.blake2b(digest_size=16)
        for column in ("token_ids", "sampler_logprobs"):
            digest.update(np.ascontiguousarray(bundle.tokens[column][start:end]).data)
        digests.append(digest.digest())
    return digests


def check_run(steps: Sequence[StepSummary]) -> list[Finding]:
    """Check two steps or more, in order. One step has nothing to compare."""
    if len(steps) < 2:
        return []
    findings = []
    for name, check in RUN_CHECKS.items():
        try:
            findings.append(check(steps))
        except MissingError as missing:
            findings.append(unknown(name, "", missing.name))
    return findings


def check_weights(steps: Sequence[StepSummary]) -> Finding:
    """Check that samples come from newer weights as the trainer makes them."""
    name = "run.weights_arrive"
    checked = "samples come from newer weights as the trainer makes them"
    trainer = []
    sampled = []
    for step in steps:
        if step.trainer_version is None:
            raise MissingError("weight_version")
        if step.sampled_version is None:
            raise MissingError("weight_versions")
        trainer.append(step.trainer_version)
        sampled.append(step.sampled_version)
    updates = trainer[-1] - trainer[0]
    lag = trainer[-1] - sampled[-1]
    details = {"unit": "steps", "residual": float(lag)}
    if updates < FEWEST_UPDATES or sampled[-1] != sampled[0] or lag < FEWEST_UPDATES:
        return passed(name, checked, len(steps), **details)
    text = (
        f"the trainer's version rises from {trainer[0]} to {trainer[-1]}, but all "
        f"samples are of {sampled[0]}"
    )
    problem = Problem(
        "weights_never_arrive", text, "Look at what sends weights to the sampler."
    )
    return failed(name, checked, len(steps), problem, **details)


def check_new_samples(steps: Sequence[StepSummary]) -> Finding:
    """Check that no step consists of the samples of the one before it."""
    name = "run.new_samples"
    checked = "no step repeats most samples of the step before it"
    largest = 0.0
    for previous, step in itertools.pairwise(steps):
        if previous.digests is None or step.digests is None:
            raise MissingError("sampler_logprobs")
        share = len(previous.digests & step.digests) / max(len(step.digests), 1)
        largest = max(largest, share)
        if share > MOST_REPEATED:
            text = f"{share:.0%} of the rows of step {step.step} are those of step {previous.step}"
            problem = Problem(
                "step_repeated", text, "A batch was read twice, or was not replaced."
            )
            return failed(
                name,
                checked,
                len(steps),
                problem,
                unit="steps",
                bound=MOST_REPEATED,
                residual=share,
            )
    return passed(
        name, checked, len(steps), unit="steps", bound=MOST_REPEATED, residual=largest
    )


RUN_CHECKS = {"run.weights_arrive": check_weights, "run.new_samples": check_new_samples}
