"""Rollout correction: sampler and trainer are two programs, so their log-probs of a token differ.

    rollout_log_probs (sampler), old_log_probs (trainer, same weights) --> weights of tokens' losses, metrics

rho_t = pi_old(y_t) / pi_rollout(y_t) is the importance weight from sampler to trainer. Without
`old_log_probs`, the current log-probs are the old ones (a single update). Weights carry no gradient.
Denominators cover the whole mini-batch: a rejected token counts as 0, because rejection is not known before
the forward pass.

N predicted tokens.
"""

import math

import torch
from torch import Tensor

from workers.batch.metrics import Reduction
from workers.config.roles import RolloutCorrectionConfig
from workers.errors import ConfigError
from workers.model.losses.kl import bounded_expm1, kl_estimate
from workers.model.losses.predictions import Predictions, Statistics, extreme, mean


def correction_weights(
    predictions: Predictions, config: RolloutCorrectionConfig
) -> tuple[Tensor | None, Statistics]:
    """Return the weight of each token's policy loss [N], or None without correction, and metrics.

        weights=token        min(rho_t, cap)                 truncated importance sampling, Yao et al. 2025
        weights=sequence     min(prod_t rho_t, cap)          of the whole sequence: less bias, more variance
        rejection=token      0 unless low <= rho_t <= high   IcePop, Ling team 2025
        rejection=sequence   0 unless low <= (prod_t rho_t)^(1/n) <= high, n its tokens    Liu et al. 2025

    With both, the weights multiply. Needs `rollout_log_probs`. Raises ConfigError for an unknown name.
    """
    if config.weights == config.rejection == "none":
        return None, {}
    log_ratio = log_ratio_to_rollout(predictions)
    importance = _importance(predictions, log_ratio, config)
    mask = _kept(predictions, log_ratio, config).to(log_ratio.dtype)
    weights = importance * mask
    statistics = {
        "rollout_kl": mean(kl_estimate(log_ratio, "k3")),
        "rollout_chi_square": mean(bounded_expm1(2 * log_ratio)),
        "rollout_rejected_fraction": mean(1 - mask),
        "rollout_weight_mean": mean(weights),
        **extreme("rollout_weight_max", weights, Reduction.MAX),
        **extreme("rollout_weight_min", weights, Reduction.MIN),
    }
    if config.weights != "none":
        statistics["rollout_truncated_fraction"] = mean(
            (importance >= config.cap).to(log_ratio.dtype)
        )
    return weights, statistics


def log_ratio_to_rollout(predictions: Predictions) -> Tensor:
    """Return log rho_t [N], without gradient."""
    current = predictions.log_probs.detach()
    return (
        predictions.columns.get("old_log_probs", current) - predictions["rollout_log_probs"]
    )


def _importance(
    predictions: Predictions, log_ratio: Tensor, config: RolloutCorrectionConfig
) -> Tensor:
    if config.weights == "none":
        return torch.ones_like(log_ratio)
    if config.weights not in ("token", "sequence"):
        raise ConfigError(
            f"algorithm.loss.rollout_correction.weights={config.weights} is not one of none, token, sequence"
        )
    if config.weights == "sequence":
        log_ratio = predictions.sequence_sum(log_ratio)
    # Truncate before the exponential, which would overflow for a long sequence.
    return log_ratio.clamp(max=math.log(config.cap)).exp()


def _kept(
    predictions: Predictions, log_ratio: Tensor, config: RolloutCorrectionConfig
) -> Tensor:
    if config.rejection == "none":
        return torch.ones_like(log_ratio, dtype=torch.bool)
    if config.rejection not in ("token", "sequence"):
        raise ConfigError(
            f"algorithm.loss.rollout_correction.rejection={config.rejection} is not one of none, token, "
            "sequence"
        )
    if config.rejection == "sequence":
        log_ratio = predictions.sequence_mean(log_ratio)
    return (log_ratio >= math.log(config.rejection_low)) & (
        log_ratio <= math.log(config.rejection_high)
    )


def rollout_mismatch(predictions: Predictions) -> Statistics:
    """Return the absolute difference of sampler and trainer log-probs, empty without the sampler's."""
    if "rollout_log_probs" not in predictions.columns:
        return {}
    difference = (predictions["rollout_log_probs"] - predictions.log_probs.detach()).abs()
    return {
        "rollout_mismatch_mean": mean(difference),
        **extreme("rollout_mismatch_max", difference, Reduction.MAX),
    }
