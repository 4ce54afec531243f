"""Importance ratios r_t = pi(y_t) / pi_old(y_t) and their metrics, for the losses that use them."""

from torch import Tensor

from workers.config import LossConfig
from workers.model.losses.exponential import bounded_exp
from workers.model.losses.kl import kl_estimate
from workers.model.losses.predictions import Predictions
from workers.model.losses.statistics import Statistics, mean


def log_ratio_to_old(predictions: Predictions) -> Tensor:
    """log r_t = log_prob_t - old_log_prob_t, [N], with gradient.

    Without `old_log_probs` the policy before the update is taken as old, r_t = 1: exact for the first and only update
    on a batch, and one forward pass cheaper.
    """
    return predictions.log_probs - predictions.columns.get("old_log_probs", predictions.log_probs.detach())


def ratio_to_old(predictions: Predictions) -> Tensor:
    """r_t, [N], with gradient; see `bounded_exp`."""
    return bounded_exp(log_ratio_to_old(predictions))


def clip(ratio: Tensor, config: LossConfig) -> Tensor:
    """clip(r, 1 - clip_low, 1 + clip_high)."""
    return ratio.clamp(1 - config.clip_low, 1 + config.clip_high)


def ratio_statistics(log_ratio: Tensor, clipped: Tensor) -> Statistics:
    """clipped: bool [N], tokens to which the clip gives no gradient."""
    return {
        "clip_fraction": mean(clipped.to(log_ratio.dtype)),
        "approximate_kl": mean(kl_estimate(-log_ratio.detach(), "k3")),
    }
