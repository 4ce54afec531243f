"""Policy losses with importance ratios r_t = pi(y_t) / pi_old(y_t), and REINFORCE without.

    ppo_clip    hard clip of the surrogate: clipped tokens have no gradient
    cispo       hard clip of the weight: every token keeps a gradient
    sapo        soft gate instead of the clip
    gspo        clip of the geometric mean of the sequence's ratios
    gmpo        geometric mean of the sequence's clipped ratios

A_t: `advantages`, by token or sequence. |y|: predicted tokens of the sequence. gspo and gmpo share one value
among a sequence's tokens: under sequence_mean_token_mean the aggregate is the papers' mean over sequences.
"""

import torch
from torch import Tensor

from workers.config.roles import LossConfig
from workers.model.losses.kl import bounded_exp, bounded_expm1
from workers.model.losses.predictions import Predictions, Statistics, mean
from workers.model.losses.registry import (
    clip,
    log_ratio_to_old,
    policy_loss,
    ratio_statistics,
)


@policy_loss("reinforce", aggregation="token_mean")
def reinforce(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
    """The policy gradient (Williams 1992).

        L_t = -A_t log pi(y_t)

    Unbiased only on samples of the current policy: use one update a batch.
    """
    return -predictions["advantages"] * predictions.log_probs, {}


@policy_loss("ppo_clip", aggregation="token_mean")
def ppo_clip(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
    """Clipped surrogate (Schulman et al. 2017, eq. 7), with separate bounds (DAPO, Yu et al. 2025, eq. 10).

        L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
        with dual_clip = c > 1, for A_t < 0:   L_t = -max(min(...), c A_t)      (Ye et al. 2020)

    The dual clip bounds the loss of a bad token that has become likely.
    """
    losses, clipped, log_ratio = surrogate(predictions, config)
    statistics = ratio_statistics(log_ratio, clipped)
    if not config.dual_clip:
        return losses, statistics
    advantages = predictions["advantages"]
    bound = torch.where(advantages < 0, -config.dual_clip * advantages, torch.inf)
    statistics["dual_clip_fraction"] = mean((losses > bound).to(losses.dtype))
    return torch.minimum(losses, bound), statistics


def surrogate(
    predictions: Predictions, config: LossConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (clipped surrogate loss [N], where clipped, bool [N], log ratio [N])."""
    log_ratio = log_ratio_to_old(predictions)
    advantages = predictions["advantages"]
    ratio = bounded_exp(log_ratio)
    unclipped = ratio * advantages
    clipped = clip(ratio, config) * advantages
    return -torch.minimum(unclipped, clipped), clipped < unclipped, log_ratio


@policy_loss("cispo", aggregation="token_mean")
def cispo(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
    """Clipped importance-sampling policy optimisation (MiniMax-M1, Chen et al. 2025, eqs. 4 and 5).

        L_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi(y_t)          sg: no gradient

    The paper has no lower bound (clip_low = 1) and tunes the upper.
    """
    log_ratio = log_ratio_to_old(predictions)
    ratio = bounded_exp(log_ratio.detach())
    weight = clip(ratio, config)
    return -weight * predictions["advantages"] * predictions.log_probs, ratio_statistics(
        log_ratio, weight != ratio
    )


@policy_loss("sapo", aggregation="sequence_mean_token_mean")
def sapo(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
    """Soft adaptive policy optimisation (Gao et al. 2025).

        L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t
        tau = sapo_tau_positive if A_t > 0, else sapo_tau_negative

    Its gradient is the policy gradient times r_t 4 p (1 - p), p the sigmoid: 1 at r_t = 1, fading on both
    sides.
    """
    log_ratio = log_ratio_to_old(predictions)
    advantages = predictions["advantages"]
    tau = torch.full_like(log_ratio, config.sapo_tau_negative)
    tau = tau.masked_fill(advantages > 0, config.sapo_tau_positive)
    gate = torch.sigmoid(tau * bounded_expm1(log_ratio))
    statistics = ratio_statistics(log_ratio, torch.zeros_like(gate, dtype=torch.bool))
    del statistics["clip_fraction"]
    statistics["sapo_gate"] = mean(4 * gate * (1 - gate))
    return -4 / tau * gate * advantages, statistics


@policy_loss("gspo", aggregation="sequence_mean_token_mean")
def gspo(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
    """Group sequence policy optimisation (Zheng et al. 2025, eqs. 5 to 7, in the token form of eqs. 13 and
    14).

        s = exp(1/|y| sum_t log r_t)          s_t = sg(s) pi(y_t) / sg(pi(y_t))          sg: no gradient
        L_t = -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)

    With one advantage a sequence, loss and gradient equal the sequence form's. The paper's bounds are 3e-4
    and 4e-4.
    """
    log_ratio = log_ratio_to_old(predictions)
    advantages = predictions["advantages"]
    ratio = sequence_ratio(predictions, log_ratio)
    unclipped = ratio * advantages
    clipped = clip(ratio, config) * advantages
    return -torch.minimum(unclipped, clipped), ratio_statistics(
        log_ratio, clipped < unclipped
    )


def sequence_ratio(predictions: Predictions, log_ratio: Tensor) -> Tensor:
    """Return s_t of `gspo` at each token, [N]. log_ratio: log r_t, [N]."""
    gradient_term = predictions.log_probs - predictions.log_probs.detach()
    return bounded_exp(predictions.sequence_mean(log_ratio.detach()) + gradient_term)


@policy_loss("gmpo", aggregation="sequence_mean_token_mean")
def gmpo(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
    """Geometric-mean policy optimisation (Zhao et al. 2025), with bounds on the log ratio.

        d_t = min(log r_t, clip_high)   if A > 0,      max(log r_t, -clip_low)   otherwise
        L = -A exp(1/|y| sum_t d_t)

    Each ratio is clipped to [e^-clip_low, e^clip_high] where PPO would clip it. The paper's bounds are 0.4. A
    is one number a sequence.
    """
    log_ratio = log_ratio_to_old(predictions)
    advantages = predictions["advantages"]
    bounded = torch.where(
        advantages > 0,
        log_ratio.clamp(max=config.clip_high),
        log_ratio.clamp(min=-config.clip_low),
    )
    ratio = bounded_exp(predictions.sequence_mean(bounded))
    return -advantages * ratio, ratio_statistics(log_ratio, bounded != log_ratio)
