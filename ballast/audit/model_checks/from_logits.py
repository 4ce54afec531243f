"""Explanations that need the logits of a row alone.

logits [P, V] --temperature, shift, top-p, top-k, another end token--> log-probs [P]
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ballast.audit.model_checks.sample import Row
from ballast.audit.model_checks.scoring import log_probs

TOP_P = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
TOP_K = (5, 10, 20, 40, 50, 64, 100)
TEMPERATURES = np.geomspace(0.2, 5.0, 41)
FITTED_TOKENS = 256


@dataclass(frozen=True)
class Explanation:
    """cause: a word for programs. text: ends the sentence "the log-probs are those ..."."""

    cause: str
    text: str
    advice: str


@dataclass(frozen=True)
class Sampling:
    """Settings of the step: temperature, top_p and top_k (0 for none), ids that end a response."""

    temperature: float
    top_p: float
    top_k: int
    end_tokens: frozenset[int]


def explain_from_logits(
    row: Row, logits: torch.Tensor, sampling: Sampling, fitted_temperature: float
) -> Iterator[tuple[Explanation, np.ndarray]]:
    """Yield explanations, and the log-probs [P] that each predicts."""
    yield from _temperatures(row, logits, sampling, fitted_temperature)
    usual = log_probs(logits, row.targets, sampling.temperature)
    yield from _shifts(row, usual)
    yield from _cuts(row, logits / sampling.temperature, usual, sampling)
    yield from _other_ends(row, logits / sampling.temperature, usual, sampling)


def _temperatures(
    row: Row, logits: torch.Tensor, sampling: Sampling, fitted: float
) -> Iterator[tuple[Explanation, np.ndarray]]:
    temperature = sampling.temperature
    advice = "Divide logits by the temperature of sampling, once, on both sides."
    named = {
        "temperature_left_out": (1.0, "of logits that were not divided by the temperature"),
        "temperature_twice": (
            temperature**2,
            "of logits that were divided by the temperature twice",
        ),
        "temperature_inverted": (
            1 / temperature,
            "of logits that were multiplied by the temperature",
        ),
    }
    for cause, (value, text) in named.items():
        if temperature != 1:
            yield Explanation(cause, text, advice), log_probs(logits, row.targets, value)
    text = f"at temperature {fitted:.3g}, not {temperature:g}"
    yield Explanation("temperature", text, advice), log_probs(logits, row.targets, fitted)


def fit_temperature(row: Row, logits: torch.Tensor) -> float:
    """Return the temperature at which the model's log-probs are nearest to the recorded ones."""
    logits = logits[:FITTED_TOKENS]
    targets = row.targets[:FITTED_TOKENS]
    recorded = row.recorded[:FITTED_TOKENS]

    def difference(temperature: float) -> float:
        return float(np.abs(log_probs(logits, targets, temperature) - recorded).mean())

    best = min(
        range(len(TEMPERATURES)), key=lambda index: difference(float(TEMPERATURES[index]))
    )
    low = float(TEMPERATURES[max(best - 1, 0)])
    high = float(TEMPERATURES[min(best + 1, len(TEMPERATURES) - 1)])
    for _ in range(40):
        first = low + (high - low) * 0.382
        second = low + (high - low) * 0.618
        if difference(first) < difference(second):
            high = second
        else:
            low = first
    return (low + high) / 2


def _shifts(row: Row, usual: np.ndarray) -> Iterator[tuple[Explanation, np.ndarray]]:
    advice = "A log-prob stands at its own token."
    for cause, offset, text in (
        ("shifted_right", -1, "of the tokens one place earlier"),
        ("shifted_left", 1, "of the tokens one place later"),
    ):
        shifted = usual.copy()
        for turn in row.turns():
            # The neighbour of a turn's outermost token may be masked, and is then not known.
            if offset < 0:
                shifted[turn[1:]] = usual[turn[:-1]]
                shifted[turn[:1]] = row.recorded[turn[:1]]
            else:
                shifted[turn[:-1]] = usual[turn[1:]]
                shifted[turn[-1:]] = row.recorded[turn[-1:]]
        if len(usual) > 2:
            yield Explanation(cause, text, advice), shifted


def _cuts(
    row: Row, logits: torch.Tensor, usual: np.ndarray, sampling: Sampling
) -> Iterator[tuple[Explanation, np.ndarray]]:
    """A cut distribution adds the same to the log-probs of all tokens that it keeps."""
    advice = "Let sampler and trainer take log-probs of the same distribution."
    scores = torch.log_softmax(logits, dim=-1).sort(dim=-1, descending=True).values.double()
    cumulative = scores.exp().cumsum(dim=-1)
    for top_p in sorted({*TOP_P, sampling.top_p} - {1.0}):
        # The smallest set whose probability reaches top_p.
        kept = (cumulative - scores.exp()) < top_p
        total = (scores.exp() * kept).sum(dim=-1).log().numpy()
        cutoff = scores.masked_fill(~kept, torch.inf).min(dim=-1).values.numpy()
        cut = np.where(usual >= cutoff - 1e-6, usual - total, usual)
        yield (
            Explanation(
                f"top_p:{top_p:g}", f"of a distribution cut by top_p={top_p:g}", advice
            ),
            cut,
        )
    for top_k in sorted({*TOP_K, sampling.top_k} - {0}):
        if top_k >= scores.shape[1]:
            continue
        total = cumulative[:, top_k - 1].log().numpy()
        cutoff = scores[:, top_k - 1].numpy()
        cut = np.where(usual >= cutoff - 1e-6, usual - total, usual)
        yield (
            Explanation(
                f"top_k:{top_k}", f"of a distribution cut by top_k={top_k}", advice
            ),
            cut,
        )


def _other_ends(
    row: Row, logits: torch.Tensor, usual: np.ndarray, sampling: Sampling
) -> Iterator[tuple[Explanation, np.ndarray]]:
    scores = torch.log_softmax(logits, dim=-1).double().numpy()
    is_end = np.isin(row.targets, list(sampling.end_tokens))
    if not is_end.any():
        return
    for end in sorted(sampling.end_tokens):
        if np.all(row.targets[is_end] == end):
            continue
        text = f"of the end token {end}, where another one ends the response"
        advice = "Let sampler and chat template end a turn with the same token."
        yield (
            Explanation("end_token", text, advice),
            np.where(is_end, scores[:, end], usual),
        )
