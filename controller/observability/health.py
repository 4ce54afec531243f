"""Warn about a run that does not learn, from its steps' metrics.

    metrics of a step --Symptom by symptom--> seen in `STEPS` steps in a row? --> once: what is seen, and what to try

Printed during the run; the report recomputes it from metrics.jsonl.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEPS = 3
"""Steps in a row after which a symptom is told."""
NEARLY_ALL = 0.9
"""Share of groups without signal from which on a step has next to nothing to learn from."""
COLLAPSED = 0.1
"""Share of the first entropy below which a policy has hardly anything left to explore."""
GROWN, LEAST_MISMATCH = 10.0, 0.01
"""Multiple of the first mismatch, and nats a token, above both of which a mismatch has grown."""


@dataclass(frozen=True)
class Symptom:
    """A sign in a metric that steps teach little.

    seen: (value, first nonzero value) -> whether it shows. told: description with {value} and {first}, and advice.
    sampling: applies only to runs that sample from the policy, because entropy falls when fine-tuning learns.
    """

    metric: str
    seen: Callable[[float, float], bool]
    told: str
    sampling: bool = False


SYMPTOMS = (
    Symptom(
        "rollout/groups_without_signal",
        lambda share, _: share >= NEARLY_ALL,
        "all rewards were equal in {value:.0%} of the groups, from which GRPO and its kin learn nothing; look at the "
        "rewards in samples.jsonl, take easier or harder prompts, a reward with more levels, a larger "
        "rollout.samples_per_prompt, or algorithm.zero_variance_groups=replace",
    ),
    Symptom(
        "policy/entropy",
        lambda entropy, first: entropy < COLLAPSED * first,
        "the policy's entropy fell from {first:.3g} to {value:.3g} nats, so that its samples hardly differ; lower "
        "policy.optimizer.learning_rate, raise algorithm.loss.clip_high or algorithm.loss.entropy_coefficient",
        sampling=True,
    ),
    Symptom(
        "policy/skipped_steps",
        lambda skipped, _: skipped > 0,
        "optimiser steps were skipped because loss or gradient were NaN or infinite; lower "
        "policy.optimizer.learning_rate, or look for rewards that are huge",
    ),
    Symptom(
        "policy/grad_norm",
        lambda norm, _: not math.isfinite(norm),
        "the norm of the gradient is not finite; lower policy.optimizer.learning_rate, or look for rewards that are "
        "huge",
    ),
    Symptom(
        "policy/rollout_mismatch_mean",
        lambda mismatch, first: mismatch > max(GROWN * first, LEAST_MISMATCH),
        "log-probs of engines and trainer came to differ by {value:.2g} nats a token ({first:.2g} at first); lower "
        "policy.optimizer.learning_rate or rollout.max_staleness, or set algorithm.loss.rollout_correction",
    ),
)


class Health:
    """Watches a run's steps. samples: whether engines sample from the policy while it learns."""

    def __init__(self, *, samples: bool = True) -> None:
        self._symptoms = tuple(symptom for symptom in SYMPTOMS if samples or not symptom.sampling)
        self._first: dict[str, float] = {}
        self._in_a_row = dict.fromkeys((symptom.metric for symptom in self._symptoms), 0)

    def see(self, step: int, metrics: Mapping[str, float | None]) -> list[str]:
        """Describe each symptom that has now shown for `STEPS` steps; again only after it was gone.

        A step without the metric neither shows a symptom nor ends it.
        """
        return list(self.see_by_metric(step, metrics).values())

    def see_by_metric(self, step: int, metrics: Mapping[str, float | None]) -> dict[str, str]:
        """Return the same sentences by metric."""
        return {symptom.metric: told for symptom in self._symptoms if (told := self._of(symptom, step, metrics))}

    def _of(self, symptom: Symptom, step: int, metrics: Mapping[str, float | None]) -> str:
        name = symptom.metric
        if name not in metrics:
            return ""
        found = metrics[name]
        value = math.nan if found is None else float(found)
        if value and math.isfinite(value):
            self._first.setdefault(name, value)
        first = self._first.get(name, 0.0)
        self._in_a_row[name] = self._in_a_row[name] + 1 if symptom.seen(value, first) else 0
        if self._in_a_row[name] != STEPS:
            return ""
        return f"steps {step - STEPS + 1} to {step}: " + symptom.told.format(value=value, first=first)


def warnings(steps: Iterable[Mapping[str, Any]], *, samples: bool = True) -> list[str]:
    """Return `Health`'s warnings for all steps of a run, in order; each has its `step`, and None for NaN.

    A repeated symptom is listed once, with its count and last step.
    """
    health = Health(samples=samples)
    told: dict[str, list[tuple[int, str]]] = {}
    for metrics in steps:
        step = int(metrics["step"])
        for metric, sentence in health.see_by_metric(step, metrics).items():
            told.setdefault(metric, []).append((step, sentence))
    return [_once(found) for found in told.values()]


def _once(told: Sequence[tuple[int, str]]) -> str:
    (_, first), (last, _) = told[0], told[-1]
    return first if len(told) == 1 else f"{first} (told {len(told)} times, the last at step {last})"
