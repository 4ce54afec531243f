"""Losses of tokens in float64, and sums of them over rows.

    new, old log-probs, advantages --ratio, clip, KL, correction--> L_t --row_losses--> [B]

Formulas and references: `workers.model.losses.ratio_losses`, `kl` and `correction`.
"""

from dataclasses import dataclass

import numpy as np

from ballast.audit.bundle import Algorithm, Bundle, MissingError
from ballast.audit.token_sums import segment_sums, trained_rows

LARGEST_LOG_RATIO = 40.0
LOSSES = ("ppo_clip", "reinforce", "cispo", "gspo")


@dataclass(frozen=True)
class Variant:
    """A way to compute token losses. sign: -1 for flipped losses. old: column of the ratio's denominator.

    masked: whether the loss mask applies.
    """

    cause: str
    text: str
    algorithm: Algorithm
    sign: int = 1
    old: str = "old_logprobs"
    inverted: bool = False
    masked: bool = True


@dataclass(frozen=True)
class RowLosses:
    """Sums over the tokens of each row, float64 [B]. sizes: of absolute losses. counts: tokens."""

    sums: np.ndarray
    sizes: np.ndarray
    counts: np.ndarray


def row_losses(bundle: Bundle, variant: Variant) -> RowLosses:
    """Raises MissingError for a column that the variant reads, if it is missing or not finite."""
    sums = []
    sizes = []
    counts = []
    for _, part in bundle.parts():
        weights = _weights(part, variant)
        losses = np.zeros(part.token_count)
        chosen = np.flatnonzero(weights)
        losses[chosen] = token_losses(part, variant, chosen)
        sums.append(segment_sums(losses, part.offsets))
        sizes.append(segment_sums(np.abs(losses), part.offsets))
        counts.append(segment_sums(weights, part.offsets))
    if not sums:
        return RowLosses(np.empty(0), np.empty(0), np.empty(0))
    losses_of_rows = RowLosses(
        np.concatenate(sums), np.concatenate(sizes), np.concatenate(counts)
    )
    if not np.all(np.isfinite(losses_of_rows.sizes)):
        raise MissingError("finite log-probs and advantages")
    return losses_of_rows


def _weights(part: Bundle, variant: Variant) -> np.ndarray:
    mask = part.token_column("loss_mask").astype(bool)
    if not variant.masked:
        mask = np.ones(part.token_count, bool)
        # Nothing predicts a row's first token.
        mask[part.offsets[:-1][part.lengths > 0]] = False
    return mask & np.repeat(trained_rows(part), part.lengths)


def token_losses(part: Bundle, variant: Variant, places: np.ndarray) -> np.ndarray:
    """Return the losses of the tokens at `places`, float64."""
    algorithm = variant.algorithm
    advantages = part.token_column("advantages")[places].astype(np.float64)
    new = part.token_column("new_logprobs")[places].astype(np.float64)
    rows = np.searchsorted(part.offsets, places, side="right") - 1
    if algorithm.loss == "reinforce":
        losses = -advantages * new
    else:
        old = part.token_column(variant.old)[places].astype(np.float64)
        log_ratio = old - new if variant.inverted else new - old
        losses = _ratio_losses(algorithm, advantages, new, log_ratio, rows)
    if algorithm.correction not in (None, "none"):
        losses = losses * _correction(part, algorithm, places, rows)
    if algorithm.kl_coefficient:
        reference = part.token_column("reference_logprobs")[places].astype(np.float64)
        losses = losses + algorithm.kl_coefficient * kl_estimate(
            reference - new, algorithm.kl_estimator or "k3"
        )
    return variant.sign * losses


def _ratio_losses(
    algorithm: Algorithm,
    advantages: np.ndarray,
    new: np.ndarray,
    log_ratio: np.ndarray,
    rows: np.ndarray,
) -> np.ndarray:
    if algorithm.loss == "gspo":
        log_ratio = _row_means(log_ratio, rows)[rows]
    ratio = np.exp(np.minimum(log_ratio, LARGEST_LOG_RATIO))
    clip_low = algorithm.clip_low or 0.0
    clip_high = algorithm.clip_high or 0.0
    clipped_ratio = np.clip(ratio, 1 - clip_low, 1 + clip_high)
    if algorithm.loss == "cispo":
        return -clipped_ratio * advantages * new
    losses = -np.minimum(ratio * advantages, clipped_ratio * advantages)
    if algorithm.dual_clip:
        bound = np.where(advantages < 0, -algorithm.dual_clip * advantages, np.inf)
        losses = np.minimum(losses, bound)
    return losses


def _row_means(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    counts = np.maximum(np.bincount(rows), 1)
    return np.bincount(rows, values) / counts


def _correction(
    part: Bundle, algorithm: Algorithm, places: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Return truncated importance weights, trainer over sampler."""
    old = part.token_column("old_logprobs")[places].astype(np.float64)
    log_weight = old - part.token_column("sampler_logprobs")[places]
    if algorithm.correction == "sequence":
        log_weight = np.bincount(rows, log_weight)[rows]
    cap = np.inf if algorithm.correction_cap is None else algorithm.correction_cap
    return np.minimum(np.exp(np.minimum(log_weight, LARGEST_LOG_RATIO)), cap)


def kl_estimate(log_ratio: np.ndarray, estimator: str) -> np.ndarray:
    """Estimate KL(p || q) from samples of p, with log_ratio = log q - log p (Schulman 2020)."""
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio**2
        case "absolute":
            return np.abs(log_ratio)
        case _:
            return np.expm1(np.minimum(log_ratio, LARGEST_LOG_RATIO)) - log_ratio
