"""Metrics of a step: loss, clip fraction and KL as the trainer reported them follow from its columns."""

import numpy as np

from ballast.audit.aggregations import losses_of, named, read_batch
from ballast.audit.bundle import Algorithm, Bundle, MissingError
from ballast.audit.checks.loss import CLIPPED
from ballast.audit.finding import Finding, Problem, failed, passed
from ballast.audit.token_losses import LOSSES, Variant, kl_estimate, row_losses
from ballast.audit.token_sums import row_sums, segment_sums, sum_rows, trained_rows

RELATIVE_BOUND = 1e-3
SMALLEST_BOUND = 1e-6
AT_THE_BOUND = 1e-5
"""Ratios that are this close to a bound may round to either side of it."""


def check_values(bundle: Bundle) -> Finding:
    """Check that the reported loss, clip fraction and KL follow from the columns."""
    name = "metrics.values"
    reported = bundle.fact("metrics")
    bundle.row_column("mini_batch")
    batch = read_batch(bundle)
    counts = _of_mini_batches(row_sums(bundle, "loss_mask"), batch.mini_batches)
    checked = f"{', '.join(reported)} follow from the columns"
    largest = 0.0
    for metric, values in reported.items():
        expected, slack = _expected(bundle, metric)
        weights = np.ones(len(counts)) if metric == "loss" else counts
        numbers = np.array(values)
        if len(numbers) != len(expected):
            expected = np.average(expected, weights=weights, keepdims=True)
            slack = np.average(slack, weights=weights, keepdims=True)
        difference = np.abs(numbers - expected)
        bound = RELATIVE_BOUND * np.abs(expected) + slack + SMALLEST_BOUND
        if np.all(difference <= bound):
            largest = max(largest, float(difference.max(initial=0.0)))
            continue
        text = f"{metric} is reported as {numbers.mean():.6g}, but the columns give {expected.mean():.6g}"
        problem = Problem(
            metric, text, "Look at what the trainer counts, and how it joins mini-batches."
        )
        return failed(
            name, checked, int(counts.sum()), problem, residual=float(difference.max())
        )
    return passed(name, checked, int(counts.sum()), residual=largest)


def _of_mini_batches(sums: np.ndarray, mini_batches: np.ndarray) -> np.ndarray:
    trained = mini_batches >= 0
    return np.bincount(mini_batches[trained], sums[trained])


def _expected(bundle: Bundle, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a metric of each mini-batch, and how far rounding may move it. Raises MissingError."""
    batch = read_batch(bundle)
    if metric == "loss":
        return _expected_loss(bundle)
    algorithm = bundle.facts.algorithm
    counts = _of_mini_batches(row_sums(bundle, "loss_mask"), batch.mini_batches)
    if metric == "approximate_kl":
        sums = sum_rows(
            bundle,
            lambda part: _at_loss_tokens(part, kl_estimate(-_log_ratios(part), "k3")),
        )
        close = np.zeros(bundle.row_count)
    else:
        if bundle.setting("loss") not in (*CLIPPED, "cispo"):
            raise MissingError(
                f"a formula for the clip fraction of algorithm.loss={algorithm.loss}"
            )
        sums = sum_rows(
            bundle, lambda part: _at_loss_tokens(part, _clipped(part, algorithm))
        )
        close = sum_rows(
            bundle, lambda part: _at_loss_tokens(part, _at_a_bound(part, algorithm))
        )
    expected = _of_mini_batches(sums, batch.mini_batches) / counts
    return expected, _of_mini_batches(close, batch.mini_batches) / counts


def _expected_loss(bundle: Bundle) -> tuple[np.ndarray, np.ndarray]:
    if bundle.setting("loss") not in LOSSES:
        raise MissingError(f"a formula for algorithm.loss={bundle.facts.algorithm.loss}")
    if bundle.facts.algorithm.entropy_coefficient:
        raise MissingError("entropies (algorithm.entropy_coefficient is not 0)")
    batch = read_batch(bundle)
    losses = row_losses(bundle, Variant("", "", bundle.facts.algorithm))
    denominator = named(batch, bundle.setting("aggregation"))
    sizes = np.abs(_of_mini_batches(losses.sizes, batch.mini_batches))
    counts = _of_mini_batches(losses.counts, batch.mini_batches)
    return losses_of(batch, losses, denominator), RELATIVE_BOUND * sizes / counts


def _at_loss_tokens(part: Bundle, values: np.ndarray) -> np.ndarray:
    rows = np.repeat(trained_rows(part), part.lengths)
    return np.where(part.token_column("loss_mask").astype(bool) & rows, values, 0.0)


def _log_ratios(part: Bundle) -> np.ndarray:
    new = part.token_column("new_logprobs").astype(np.float64)
    return new - part.token_column("old_logprobs")


def _ratios(part: Bundle, algorithm: Algorithm) -> np.ndarray:
    log_ratios = _log_ratios(part)
    if algorithm.loss == "gspo":
        mask = part.token_column("loss_mask").astype(np.float64)
        counts = np.maximum(segment_sums(mask, part.offsets), 1)
        log_ratios = np.repeat(
            segment_sums(log_ratios * mask, part.offsets) / counts, part.lengths
        )
    return np.exp(np.minimum(log_ratios, 40.0))


def _bounds(algorithm: Algorithm) -> tuple[float, float]:
    if algorithm.clip_low is None or algorithm.clip_high is None:
        raise MissingError("algorithm.clip_low and algorithm.clip_high")
    return 1 - algorithm.clip_low, 1 + algorithm.clip_high


def _clipped(part: Bundle, algorithm: Algorithm) -> np.ndarray:
    ratios = _ratios(part, algorithm)
    clipped = np.clip(ratios, *_bounds(algorithm))
    if algorithm.loss == "cispo":
        return clipped != ratios
    advantages = part.token_column("advantages").astype(np.float64)
    return clipped * advantages < ratios * advantages


def _at_a_bound(part: Bundle, algorithm: Algorithm) -> np.ndarray:
    ratios = _ratios(part, algorithm)
    low, high = _bounds(algorithm)
    return (np.abs(ratios - low) < AT_THE_BOUND) | (np.abs(ratios - high) < AT_THE_BOUND)


CHECKS = {"metrics.values": check_values}
