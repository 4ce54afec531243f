"""Compute metrics of held-out responses, overall and by source, with confidence intervals.

    ScoredResponse, n of each prompt --by_prompt--> PromptValues of reward, parts, pass@k, maj@n
                                     --summarize--> one number a name
    PromptValues --interval--> each prompt 0 or 1: Wilson's score interval
                               else a percentile bootstrap of prompts

A response is right if its score `success` is at least `threshold`. Intervals are over prompts, because the
responses to one prompt are not independent.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import comb, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ScoredResponse:
    """scores: `reward` and further numbers. answer: read by the reward function, or "". text: for
    the record.
    """

    uid: str
    source: str
    scores: dict[str, float]
    answer: str = ""
    text: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptValues:
    """A metric by prompt: the sum of `sums` over the sum of `counts`, float64 [prompts] each.

    counts: responses with the score, or 1 if a prompt has one value, such as pass@k.
    """

    sums: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, values: Sequence[float]) -> "PromptValues":
        return cls(np.asarray(values, dtype=np.float64), np.ones(len(values)))

    @property
    def value(self) -> float:
        return float(self.sums.sum() / self.counts.sum())


def summarize(
    responses: Sequence[ScoredResponse], success: str, threshold: float
) -> dict[str, float]:
    """Return the mean of every score, and pass@k and maj@n for several responses per prompt, overall and by
    source.

    pass@k is given for k = 1, 2, 4, ... and n, the number of responses to most prompts. Names: `reward`,
    `pass@4`, `SOURCE/reward`. A score is averaged over the responses that have it.
    """
    return {
        name: values.value
        for name, values in by_prompt(responses, success, threshold).items()
    }


def by_prompt(
    responses: Sequence[ScoredResponse], success: str, threshold: float
) -> dict[str, PromptValues]:
    metrics = _of_one_source(responses, success, threshold)
    by_source: dict[str, list[ScoredResponse]] = defaultdict(list)
    for response in responses:
        by_source[response.source].append(response)
    if len(by_source) > 1:
        for source, members in sorted(by_source.items()):
            of_source = _of_one_source(members, success, threshold)
            metrics |= {f"{source}/{name}": values for name, values in of_source.items()}
    return metrics


def possible_metrics(samples: int, parts: Iterable[str]) -> list[str]:
    """Return the names that `summarize` may return for one source. samples: per prompt. parts: of rewards."""
    counts = (
        [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]
        if samples > 1
        else []
    )
    votes = [f"maj@{samples}"] if samples > 1 else []
    return ["reward", *parts, *(f"pass@{k}" for k in counts), *votes]


def is_possible(name: str, samples: int, parts: Iterable[str]) -> bool:
    return any(
        name == metric or name.endswith(f"/{metric}")
        for metric in possible_metrics(samples, parts)
    )


def _of_one_source(
    responses: Sequence[ScoredResponse], success: str, threshold: float
) -> dict[str, PromptValues]:
    names = sorted(
        {name for response in responses for name in response.scores},
        key=lambda name: (name != "reward", name),
    )
    groups: dict[str, list[ScoredResponse]] = defaultdict(list)
    for response in responses:
        groups[response.uid].append(response)
    metrics = {name: _score(list(groups.values()), name) for name in names}
    n = Counter(len(group) for group in groups.values()).most_common(1)[0][0]
    if n > 1:
        right = {}
        for uid, group in groups.items():
            right[uid] = [_is_right(response, success, threshold) for response in group]
        for k in [2**i for i in range(n.bit_length()) if 2**i < n] + [n]:
            values = [
                pass_at_k(len(marks), sum(marks), k)
                for marks in right.values()
                if len(marks) >= k
            ]
            metrics[f"pass@{k}"] = PromptValues.of(values)
        if any(response.answer for response in responses):
            votes = []
            for uid, group in groups.items():
                answers = [response.answer for response in group]
                votes.append(majority_is_right(answers, right[uid]))
            metrics[f"maj@{n}"] = PromptValues.of(votes)
    return metrics


def _score(groups: Sequence[Sequence[ScoredResponse]], name: str) -> PromptValues:
    scored_groups = []
    for group in groups:
        scores = [response.scores[name] for response in group if name in response.scores]
        if scores:
            scored_groups.append(scores)
    return PromptValues(
        np.array([sum(group_scores) for group_scores in scored_groups]),
        np.array([float(len(group_scores)) for group_scores in scored_groups]),
    )


def _is_right(response: ScoredResponse, success: str, threshold: float) -> bool:
    return response.scores.get(success, float("-inf")) >= threshold


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that one of k responses drawn from n is right, unbiased (Chen et al. 2021, eq. 1):

    pass@k = 1 - C(n - c, k) / C(n, k)
    """
    return 1.0 - comb(n - right, k) / comb(n, k)


def majority_is_right(answers: Sequence[str], right: Sequence[bool]) -> float:
    """Return the share of the most frequent answers that is right (Wang et al. 2023), or 0 without answers.

    Responses without an answer do not vote. Ties count equally, among answers and among verdicts on equal
    answers, so order does not matter.
    """
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return 0.0
    most = max(votes.values())
    leaders = {answer for answer, count in votes.items() if count == most}
    verdicts = [
        verdict for answer, verdict in zip(answers, right, strict=True) if answer in leaders
    ]
    return float(np.mean(verdicts))  # tied leaders


CONFIDENCE = 0.95
RESAMPLES = 2_000
NUMBERS_AT_A_TIME = 2**22  # 32 MiB for a chunk of resamples
WILSON, BOOTSTRAP = "wilson", "bootstrap"


@dataclass(frozen=True)
class Interval:
    """low <= the metric <= high. method: `wilson` or `bootstrap`."""

    low: float
    high: float
    method: str


def interval(values: PromptValues, confidence: float = CONFIDENCE) -> Interval | None:
    """Return the interval of a metric, or None if all prompts have one value other than 0 or 1."""
    if _is_binary(values):
        low, high = wilson(int(values.sums.sum()), len(values.sums), confidence)
        return Interval(low, high, WILSON)
    if np.ptp(values.sums / values.counts) == 0:
        return None
    low, high = bootstrap(values, confidence)
    return Interval(low, high, BOOTSTRAP)


def _is_binary(values: PromptValues) -> bool:
    return bool(np.all(values.counts == 1) and np.all(np.isin(values.sums, (0.0, 1.0))))


def wilson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """Return the score interval of a share (Wilson 1927): all p with

    |p_hat - p| <= z sqrt(p (1 - p) / n), that is

    (p_hat + z^2 / 2n -+ z sqrt(p_hat (1 - p_hat) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / trials
    centre = share + z * z / (2 * trials)
    scale = 1 + z * z / trials
    margin = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # At 0 and at `trials` one end is the share itself, but for rounding.
    low = 0.0 if successes == 0 else (centre - margin) / scale
    return low, 1.0 if successes == trials else (centre + margin) / scale


def bootstrap(values: PromptValues, confidence: float) -> tuple[float, float]:
    """Return the percentile interval (Efron 1979) of sum(sums) / sum(counts) over draws of prompts with
    replacement.
    """
    prompts = len(values.sums)
    rng = np.random.default_rng(0)
    at_a_time = max(1, NUMBERS_AT_A_TIME // prompts)
    means = []
    for start in range(0, RESAMPLES, at_a_time):
        count = min(at_a_time, RESAMPLES - start)
        # Draws of each prompt.
        times = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=count)
        means.append((times @ values.sums) / (times @ values.counts))
    ends = [0.5 - confidence / 2, 0.5 + confidence / 2]
    # Values that occur.
    low, high = np.quantile(np.concatenate(means), ends, method="inverted_cdf")
    return float(low), float(high)
