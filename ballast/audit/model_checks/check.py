"""Compute log-probs again, and name what explains a difference.

rows --float32--> mean difference to the column --each explanation--> the smallest, if it is rounding
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ballast.audit.bundle import Bundle
from ballast.audit.finding import Finding, Problem, failed, passed, unknown
from ballast.audit.model_checks.from_context import explain_from_context
from ballast.audit.model_checks.from_logits import (
    Explanation,
    Sampling,
    explain_from_logits,
    fit_temperature,
)
from ballast.audit.model_checks.sample import Row, sample_rows
from ballast.audit.model_checks.scoring import ScoringModel, log_probs

COLUMNS = ("sampler_logprobs", "old_logprobs")
ROWS = 8
FLOAT32_BOUND = 2e-4
"""Mean difference of two float32 computations, nats a token. 1e-6 to 3e-5 are usual."""
BFLOAT16_FACTOR = 2.0
"""Differences of two computations in bfloat16, over those of one to float32."""
EXPLAINED_SHARE = 0.25
"""An explanation leaves at most this share of a difference."""
SHOWN = 4


def check_with_models(
    bundle: Bundle, paths: Sequence[str | Path], rows: int = ROWS
) -> list[Finding]:
    """Check the log-probs of a step against its model. paths: the model, and checkpoints of other steps.

    Raises ConfigError if a model cannot be loaded or has another vocabulary.
    """
    model = ScoringModel(paths[0])
    model.check_ids(int(np.max(bundle.token_column("token_ids"), initial=0)))
    return [_check_column(bundle, column, model, paths[1:], rows) for column in COLUMNS]


def _check_column(
    bundle: Bundle,
    column: str,
    model: ScoringModel,
    others: Sequence[str | Path],
    count: int,
) -> Finding:
    name = f"model.{column}"
    checked = (
        f"{column} of sampled rows are those of {model.path} in float32, in nats a token"
    )
    if column not in bundle.tokens:
        return unknown(name, checked, column)
    rows = sample_rows(bundle, column, count, model.image_token)
    if not rows:
        return unknown(
            name, checked, "images" if model.image_token is not None else "finite log-probs"
        )
    sampling = _sampling(bundle, model)
    usual = [_predict(model, row, sampling) for row in rows]
    differences = np.array(
        [_difference(row, values) for row, values in zip(rows, usual, strict=True)]
    )
    tokens = sum(len(row.places) for row in rows)
    mean = float(np.average(differences, weights=[len(row.places) for row in rows]))
    details = {"residual": mean, "bound": FLOAT32_BOUND}
    limits = np.array([3 + 10 / len(row.places) for row in rows])
    if np.all(differences <= limits * FLOAT32_BOUND) and mean <= FLOAT32_BOUND:
        return passed(name, checked, tokens, **details)
    coarse = ScoringModel(model.path, torch.bfloat16)
    rounded = [_predict(coarse, row, sampling) for row in rows]
    noise = float(
        np.mean([np.abs(a - b).mean() for a, b in zip(rounded, usual, strict=True)])
    )
    bound = max(FLOAT32_BOUND, BFLOAT16_FACTOR * noise)
    is_rounding = mean <= bound and bool(np.all(differences <= limits * bound))
    if is_rounding and bundle.facts.precision != "float32":
        text = f"{checked.removesuffix(' in float32, in nats a token')}, up to bfloat16"
        return passed(name, text, tokens, residual=mean, bound=bound)
    is_wrong = differences > limits * (
        FLOAT32_BOUND if bundle.facts.precision == "float32" else bound
    )
    wrong = [row for row, flag in zip(rows, is_wrong, strict=True) if flag] or rows
    problem = _explain(model, wrong, sampling, others, bound, is_rounding)
    return failed(name, checked, tokens, problem, **details)


def _sampling(bundle: Bundle, model: ScoringModel) -> Sampling:
    algorithm = bundle.facts.algorithm
    ends = frozenset(bundle.facts.end_tokens) | model.end_tokens()
    return Sampling(
        algorithm.temperature or 1.0,
        algorithm.top_p or 1.0,
        max(algorithm.top_k or 0, 0),
        ends,
    )


def _predict(model: ScoringModel, row: Row, sampling: Sampling) -> np.ndarray:
    return log_probs(
        model.logits(row.token_ids, row.places), row.targets, sampling.temperature
    )


def _difference(row: Row, predicted: np.ndarray) -> float:
    return float(np.abs(predicted - row.recorded).mean())


def _explain(
    model: ScoringModel,
    rows: list[Row],
    sampling: Sampling,
    others: Sequence[str | Path],
    bound: float,
    is_rounding: bool,
) -> Problem:
    """Try each explanation on the rows that differ."""
    usual = float(
        np.mean([_difference(row, _predict(model, row, sampling)) for row in rows])
    )
    table = _try_explanations(model, rows, sampling)
    for path in others:
        other = ScoringModel(path)
        text = f"of the weights of {path}"
        explanation = Explanation(
            "other_weights", text, "Look at when weights reach the sampler."
        )
        differences = [_difference(row, _predict(other, row, sampling)) for row in rows]
        table.append((explanation, float(np.mean(differences))))
    table.sort(key=lambda entry: entry[1])
    numbers = np.array([row.number for row in rows])
    tried = ", ".join(
        f"{explanation.cause} {left:.2g}" for explanation, left in table[:SHOWN]
    )
    if table and table[0][1] <= min(bound, EXPLAINED_SHARE * usual):
        best, left = table[0]
        text = f"the log-probs are those {best.text}: the difference falls from {usual:.2g} to {left:.2g}"
        text += f" (tried {len(table)}, nearest: {tried})"
        return Problem(best.cause, text, best.advice, numbers)
    if is_rounding:
        text = f"the difference of {usual:.2g} is that of a forward pass in bfloat16, not in float32"
        return Problem(
            "bfloat16",
            text,
            "Name precision=bfloat16 in the bundle, or train in float32.",
            numbers,
        )
    text = f"they differ by {usual:.2g}, and none of {len(table)} explanations removes it (nearest: {tried})"
    advice = (
        "Is it the model of this step? Give checkpoints of other steps with --model too."
    )
    return Problem("unexplained", text, advice, numbers)


def _try_explanations(
    model: ScoringModel, rows: list[Row], sampling: Sampling
) -> list[tuple[Explanation, float]]:
    """Return explanations with the mean difference that each leaves, or the usual one."""
    thoughts = model.thought_tokens()
    longest = max(rows, key=lambda row: len(row.places))
    fitted = fit_temperature(longest, model.logits(longest.token_ids, longest.places))
    usual = np.zeros(len(rows))
    explanations: dict[str, Explanation] = {}
    differences: dict[str, dict[int, float]] = {}
    for number, row in enumerate(rows):
        logits = model.logits(row.token_ids, row.places)
        usual[number] = _difference(
            row, log_probs(logits, row.targets, sampling.temperature)
        )
        pairs = [
            *explain_from_logits(row, logits, sampling, fitted),
            *explain_from_context(model, row, sampling, thoughts),
        ]
        for explanation, predicted in pairs:
            explanations[explanation.text] = explanation
            differences.setdefault(explanation.text, {})[number] = _difference(
                row, predicted
            )
    table = []
    for text, values in differences.items():
        residuals = [values.get(number, usual[number]) for number in range(len(rows))]
        table.append((explanations[text], float(np.mean(residuals))))
    return table
