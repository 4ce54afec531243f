"""Log-probs: finite, not positive, not constant, in one scale, at their own tokens."""

from collections.abc import Callable
from functools import partial

import numpy as np

from ballast.audit.bundle import Bundle, MissingError
from ballast.audit.finding import Finding, Problem, failed, passed, unknown
from ballast.audit.pairs import (
    Selection,
    compare,
    explain,
    mean_bound,
    mini_batch_tokens,
)
from ballast.audit.token_sums import loss_tokens

COLUMNS = ("sampler_logprobs", "old_logprobs", "new_logprobs", "reference_logprobs")
LARGEST = 0.01
"""A log-prob may be above 0 by rounding."""
FEWEST_TOKENS = 8
FEWEST_COMPARED = 16
SURELY_NOT_ZERO = -0.5
"""A log-prob that is exactly 0 in one column is not below this in another."""
CLOSE_FACTOR = 3


def check_values(bundle: Bundle, column: str) -> Finding:
    """Check that a column is finite, not positive, and not constant at loss tokens."""
    name = f"log_probs.{column.removesuffix('_logprobs')}"
    checked = f"{column} is finite, not above 0 and not constant"
    count = 0
    bad: list[int] = []
    positive: list[int] = []
    lowest = np.inf
    highest = -np.inf
    for start, part in bundle.parts():
        places = loss_tokens(part)
        values = part.token_column(column)[places]
        is_finite = np.isfinite(values)
        count += len(places)
        bad += _rows_of(part, places[~is_finite], start)
        positive += _rows_of(part, places[is_finite & (values > LARGEST)], start)
        lowest = min(lowest, float(values[is_finite].min(initial=np.inf)))
        highest = max(highest, float(values[is_finite].max(initial=-np.inf)))
    details = {"bound": LARGEST, "residual": highest if count else 0.0}
    if bad:
        text = f"{column} is NaN or infinite in {len(bad)} rows"
        problem = Problem(
            "not_finite", text, "Look at the forward pass that made it.", np.array(bad)
        )
        return failed(name, checked, count, problem, **details)
    if count >= FEWEST_TOKENS and lowest == highest:
        cause = "all_zero" if lowest == 0 else "constant"
        problem = Problem(
            cause, f"{column} is {lowest:g} at every token", "It was filled, not computed."
        )
        return failed(name, checked, count, problem, **details)
    if positive:
        problem = _explain_positive(column, lowest, highest, np.array(positive))
        return failed(name, checked, count, problem, **details)
    return passed(name, checked, count, **details)


def _rows_of(part: Bundle, places: np.ndarray, start: int) -> list[int]:
    rows = np.searchsorted(part.offsets, places, side="right") - 1
    return (np.unique(rows) + start).tolist()


def _explain_positive(
    column: str, lowest: float, highest: float, rows: np.ndarray
) -> Problem:
    if lowest >= 0 and highest <= 1 + LARGEST:
        text = f"{column} lies between 0 and 1: probabilities, not their logarithms"
        return Problem("probabilities", text, "Take their logarithm.", rows)
    if lowest >= -LARGEST:
        return Problem("sign_flipped", f"{column} is never negative", "Negate it.", rows)
    text = f"{column} reaches {highest:.3g} in {len(rows)} rows"
    return Problem(
        "positive", text, "A log-prob is at most 0: look at what else was written.", rows
    )


def check_filled(bundle: Bundle) -> Finding:
    """Check that no column is exactly 0 where another one is clearly not."""
    name = "log_probs.filled"
    columns = [column for column in COLUMNS if bundle.has(column)]
    checked = "no log-prob is exactly 0 where another column is below -0.5"
    if len(columns) < 2:
        raise MissingError(next(column for column in COLUMNS if column not in columns))
    count = 0
    zeros = dict.fromkeys(columns, 0)
    rows: dict[str, list[int]] = {column: [] for column in columns}
    for start, part in bundle.parts():
        places = loss_tokens(part)
        count += len(places)
        table = np.stack([part.token_column(column)[places] for column in columns])
        lowest = np.nanmin(table, axis=0) if len(places) else np.empty(0)
        for column, values in zip(columns, table, strict=True):
            filled = places[(values == 0) & (lowest < SURELY_NOT_ZERO)]
            zeros[column] += len(filled)
            rows[column] += _rows_of(part, filled, start)
    worst = max(columns, key=zeros.__getitem__)
    details = {"bound": 0.0, "residual": float(zeros[worst])}
    if not zeros[worst]:
        return passed(name, checked, count, **details)
    cause = "all_zero" if zeros[worst] > 0.99 * count else "partly_zero"
    text = f"{worst} is exactly 0 at {zeros[worst]} of {count} tokens, where another column is below -0.5"
    problem = Problem(
        cause, text, "Look at what fills missing log-probs with 0.", np.array(rows[worst])
    )
    return failed(name, checked, count, problem, **details)


def check_sampler(bundle: Bundle) -> Finding:
    """Check that sampler and trainer give the same log-probs at equal weights.

    Without old log-probs, those of the first update are compared: later ones come from weights that have
    moved.
    """
    name = "log_probs.sampler_and_trainer"
    bound = mean_bound(bundle)
    checked = "sampler and trainer agree at equal weights, in nats a token"
    trainer = "old_logprobs" if bundle.has("old_logprobs") else "new_logprobs"
    for column in ("sampler_logprobs", trainer):
        bundle.token_column(column)
    versions_known = (
        bundle.has("weight_versions") and bundle.facts.weight_version is not None
    )
    selection: Selection = _tokens_at_equal_weights if versions_known else loss_tokens
    is_of_updates = trainer == "new_logprobs"
    if is_of_updates and bundle.has("mini_batch"):
        selection = mini_batch_tokens(bundle, first=True, among=selection)
    comparison = compare(bundle, "sampler_logprobs", trainer, selection)
    if not comparison.count:
        return unknown(name, checked, "tokens of the trainer's weight_version")
    rows = comparison.rows_beyond(bound)
    details = {"bound": bound, "residual": comparison.mean}
    if comparison.mean <= bound and not len(rows):
        return passed(name, checked, comparison.count, **details)
    problem = explain(bundle, "sampler_logprobs", trainer, selection, bound)
    if problem is None and _is_truncated_sampling(bundle):
        return unknown(
            name, checked, "log-probs of the whole distribution (top-p or top-k cut them)"
        )
    if problem is None and is_of_updates and not bundle.has("mini_batch"):
        return unknown(name, checked, "old_logprobs, or mini_batch")
    if problem is None and not versions_known:
        return unknown(name, checked, "weight_versions")
    if problem is None:
        problem = _unexplained(comparison.mean, rows, comparison.row_counts, bound)
    return failed(name, checked, comparison.count, problem, **details)


def _tokens_at_equal_weights(part: Bundle) -> np.ndarray:
    places = loss_tokens(part)
    return places[part.token_column("weight_versions")[places] == part.facts.weight_version]


def _is_truncated_sampling(bundle: Bundle) -> bool:
    algorithm = bundle.facts.algorithm
    return (algorithm.top_p or 1.0) < 1.0 or (algorithm.top_k or 0) > 0


def _unexplained(
    mean: float, rows: np.ndarray, counts: np.ndarray, bound: float
) -> Problem:
    compared_rows = int(np.count_nonzero(counts))
    if 0 < len(rows) <= compared_rows / 2:
        text = f"{len(rows)} of {compared_rows} rows differ, the others agree"
        return Problem("some_rows", text, "Look at what these rows have in common.", rows)
    text = f"they differ by {mean:.3g} nats a token, and no shift, scale, base or order explains it"
    advice = "Other weights, another distribution or an adapter: `--model` tries them."
    return Problem("unexplained", text, advice, rows)


def check_places(bundle: Bundle, column: str) -> Finding:
    """Check that a column stands at its own tokens, by correlation with the trainer's."""
    name = f"log_probs.{column.removesuffix('_logprobs')}_places"
    trainer = "old_logprobs" if bundle.has("old_logprobs") else "sampler_logprobs"
    checked = f"{column} stands at the tokens of {trainer}, in the same scale"
    for needed in (column, trainer):
        bundle.token_column(needed)
    comparison = compare(bundle, column, trainer, loss_tokens)
    bound = CLOSE_FACTOR * mean_bound(bundle)
    details = {"residual": comparison.mean}
    if comparison.count < FEWEST_COMPARED or comparison.mean <= bound:
        return passed(name, checked, comparison.count, **details)
    problem = explain(bundle, column, trainer, loss_tokens, mean_bound(bundle))
    # Other weights give other numbers, so only a change that explains them is a fault.
    if problem is None or problem.cause in ("temperature", "sequence_mean", "clamped"):
        return passed(name, checked, comparison.count, **details)
    return failed(name, checked, comparison.count, problem, **details)


CHECKS: dict[str, Callable[[Bundle], Finding]] = {
    **{
        f"log_probs.{column.removesuffix('_logprobs')}": partial(
            check_values, column=column
        )
        for column in COLUMNS
    },
    "log_probs.filled": check_filled,
    "log_probs.sampler_and_trainer": check_sampler,
    "log_probs.new_places": partial(check_places, column="new_logprobs"),
    "log_probs.reference_places": partial(check_places, column="reference_logprobs"),
}
