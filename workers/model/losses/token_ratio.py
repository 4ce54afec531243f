"""Policy losses that weigh each token by its own ratio r_t = pi(y_t) / pi_old(y_t), and REINFORCE, which has none.

    ppo_clip    hard clip of the surrogate; clipped tokens have no gradient
    cispo       hard clip of the weight; every token keeps a gradient
    sapo        soft gate in place of the clip

A_t: the advantage of token t, `advantages`, given by token or by sequence. Token losses [N], to be minimised.
"""

import torch
from torch import Tensor

from workers.config import LossConfig
from workers.model.losses.exponential import bounded_exp, bounded_expm1
from workers.model.losses.predictions import Predictions
from workers.model.losses.ratio import clip, log_ratio_to_old, ratio_statistics
from workers.model.losses.registry import policy_loss
from workers.model.losses.statistics import Statistics, mean


@policy_loss("reinforce", aggregation="token_mean")
def reinforce(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
    """The policy gradient itself (Williams 1992).

        L_t = -A_t log pi(y_t)

    Unbiased on samples of the current policy only: meant for one update a batch. Normaliser: token_mean.
    """
    return -predictions["advantages"] * predictions.log_probs, {}


@policy_loss("ppo_clip", aggregation="token_mean")
def ppo_clip(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
    """Clipped surrogate (Schulman et al. 2017, eq. 7), with separate bounds (DAPO, Yu et al. 2025, eq. 10).

        L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
        with dual_clip = c > 1, for A_t < 0:   L_t = -max(min(...), c A_t)      (Ye et al. 2020)

    The dual clip bounds the loss of a bad token that has become likely, for which r_t has no other bound.
    Normaliser: token_mean.
    """
    losses, clipped, log_ratio = surrogate(predictions, config)
    statistics = ratio_statistics(log_ratio, clipped)
    if not config.dual_clip:
        return losses, statistics
    advantages = predictions["advantages"]
    bound = torch.where(advantages < 0, -config.dual_clip * advantages, torch.inf)
    statistics["dual_clip_fraction"] = mean((losses > bound).to(losses.dtype))
    return torch.minimum(losses, bound), statistics


def surrogate(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """(clipped surrogate loss [N], where the clip has cut it, bool [N], log ratio [N])."""
    log_ratio, advantages = log_ratio_to_old(predictions), predictions["advantages"]
    ratio = bounded_exp(log_ratio)
    unclipped, clipped = ratio * advantages, clip(ratio, config) * advantages
    return -torch.minimum(unclipped, clipped), clipped < unclipped, log_ratio


@policy_loss("cispo", aggregation="token_mean")
def cispo(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
    """Clipped importance-sampling policy optimisation (MiniMax-M1, Chen et al. 2025, eqs. 4 and 5).

        L_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi(y_t)          sg: no gradient

    The paper has no lower bound (clip_low = 1) and tunes the upper. Normaliser: token_mean.
    """
    log_ratio = log_ratio_to_old(predictions)
    ratio = bounded_exp(log_ratio.detach())
    weight = clip(ratio, config)
    return -weight * predictions["advantages"] * predictions.log_probs, ratio_statistics(log_ratio, weight != ratio)


@policy_loss("sapo", aggregation="sequence_mean_token_mean")
def sapo(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
    """Soft adaptive policy optimisation (Gao et al. 2025).

        L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t          tau = sapo_tau_positive if A_t > 0, else sapo_tau_negative

    Its gradient is that of the policy gradient times r_t 4 p (1 - p), p the sigmoid: 1 at r_t = 1, fading smoothly on
    both sides. Normaliser: sequence_mean_token_mean.
    """
    log_ratio, advantages = log_ratio_to_old(predictions), predictions["advantages"]
    positive, negative = (log_ratio.new_tensor(tau) for tau in (config.sapo_tau_positive, config.sapo_tau_negative))
    tau = torch.where(advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * bounded_expm1(log_ratio))
    statistics = ratio_statistics(log_ratio, torch.zeros_like(gate, dtype=torch.bool))
    del statistics["clip_fraction"]
    statistics["sapo_gate"] = mean(4 * gate * (1 - gate))
    return -4 / tau * gate * advantages, statistics
