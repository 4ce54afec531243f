"""Warn about a run that does not learn, from its steps' metrics.

    metrics of a step --Symptom by symptom--> seen in `STEPS` steps in a row? --> once: a sign, and advice

A run prints the warnings. Its report computes them again from metrics.jsonl.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

STEPS = 3  # in a row, after which a symptom is reported
NEARLY_ALL = 0.9  # share of groups without signal
COLLAPSED = 0.1  # share of the first entropy
GROWN, LEAST_MISMATCH = 10.0, 0.01  # multiple of the first mismatch, and nats a token


@dataclass(frozen=True)
class Symptom:
    """A sign in a metric that steps teach little.

    seen: (value, first nonzero value) -> whether it shows. description: text with {value}, {first} and
    advice. sampling: applies only to runs that sample from the policy, because entropy falls when
    fine-tuning learns.
    """

    metric: str
    seen: Callable[[float, float], bool]
    description: str
    sampling: bool = False


SYMPTOMS = (
    Symptom(
        "rollout/groups_without_signal",
        lambda share, _: share >= NEARLY_ALL,
        "all rewards were equal in {value:.0%} of the groups, so GRPO and similar algorithms learn nothing "
        "from them. Look at the rewards in samples.jsonl. Take easier or harder prompts, a reward with "
        "more levels, a larger rollout.samples_per_prompt, or algorithm.zero_variance_groups=replace",
    ),
    Symptom(
        "policy/entropy",
        lambda entropy, first: entropy < COLLAPSED * first,
        "the policy's entropy fell from {first:.3g} to {value:.3g} nats, so its samples hardly differ. "
        "Lower policy.optimizer.learning_rate, raise algorithm.loss.clip_high or "
        "algorithm.loss.entropy_coefficient",
        sampling=True,
    ),
    Symptom(
        "policy/skipped_steps",
        lambda skipped, _: skipped > 0,
        "optimiser steps were skipped because loss or gradient were NaN or infinite. Lower "
        "policy.optimizer.learning_rate, or look for huge rewards and at a loss of your own",
    ),
    Symptom(
        "policy/grad_norm",
        lambda norm, _: not math.isfinite(norm),
        "the norm of the gradient is not finite. Lower policy.optimizer.learning_rate, or look for huge "
        "rewards",
    ),
    Symptom(
        "policy/rollout_mismatch_mean",
        lambda mismatch, first: mismatch > max(GROWN * first, LEAST_MISMATCH),
        "log-probs of engines and trainer now differ by {value:.2g} nats a token ({first:.2g} at first). "
        "Lower policy.optimizer.learning_rate or rollout.max_staleness, or set "
        "algorithm.loss.rollout_correction",
    ),
)


class Health:
    """Watches a run's steps. samples: whether engines sample from the policy while it learns."""

    def __init__(self, *, samples: bool = True) -> None:
        self._symptoms = tuple(
            symptom for symptom in SYMPTOMS if samples or not symptom.sampling
        )
        self._first: dict[str, float] = {}
        self._in_a_row = dict.fromkeys((symptom.metric for symptom in self._symptoms), 0)

    def see(self, step: int, metrics: Mapping[str, float | None]) -> dict[str, str]:
        """Describe, by metric, each symptom seen for `STEPS` steps. A value that is not finite is None.

        A symptom is described again only after it was gone. A step without the metric does not count.
        """
        descriptions = {}
        for symptom in self._symptoms:
            name = symptom.metric
            if name not in metrics:
                continue
            value = math.nan if (number := metrics[name]) is None else float(number)
            if value and math.isfinite(value):
                self._first.setdefault(name, value)
            first = self._first.get(name, 0.0)
            self._in_a_row[name] = (
                self._in_a_row[name] + 1 if symptom.seen(value, first) else 0
            )
            if self._in_a_row[name] == STEPS:
                text = symptom.description.format(value=value, first=first)
                descriptions[name] = f"steps {step - STEPS + 1} to {step}: {text}"
        return descriptions


def warnings(steps: Iterable[Mapping[str, Any]], *, samples: bool = True) -> list[str]:
    """Return `Health`'s warnings about a run's rows of metrics.jsonl, each symptom once."""
    health = Health(samples=samples)
    seen: dict[str, list[tuple[int, str]]] = {}
    for metrics in steps:
        step = int(metrics["step"])
        for metric, sentence in health.see(step, metrics).items():
            seen.setdefault(metric, []).append((step, sentence))
    return [
        first
        if not repeats
        else f"{first} (told {1 + len(repeats)} times, the last at step {repeats[-1][0]})"
        for (_, first), *repeats in seen.values()
    ]
