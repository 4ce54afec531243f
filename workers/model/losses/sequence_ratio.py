"""Policy losses that weigh a whole sequence by one ratio, a mean of its tokens' ratios r_t = pi(y_t) / pi_old(y_t).

    gspo    clip of the geometric mean of the ratios          gmpo    geometric mean of the clipped ratios

|y|: predicted tokens of the sequence. Token losses [N]; all tokens of a sequence share one value, so that under their
own normaliser, sequence_mean_token_mean, the aggregate is the papers' mean over sequences.
"""

import torch
from torch import Tensor

from workers.config import LossConfig
from workers.model.losses.exponential import bounded_exp
from workers.model.losses.predictions import Predictions
from workers.model.losses.ratio import clip, log_ratio_to_old, ratio_statistics
from workers.model.losses.registry import policy_loss
from workers.model.losses.statistics import Statistics


@policy_loss("gspo", aggregation="sequence_mean_token_mean")
def gspo(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
    """Group sequence policy optimisation (Zheng et al. 2025, eqs. 5 to 7, in the token form of eqs. 13 and 14).

        s = exp(1/|y| sum_t log r_t)          s_t = sg(s) pi(y_t) / sg(pi(y_t))          sg: no gradient
        L_t = -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)

    s_t has the value of s. With one advantage a sequence, loss and gradient are those of the sequence form; with an
    advantage a token, each token keeps its own. The paper's bounds are 3e-4 and 4e-4. Normaliser:
    sequence_mean_token_mean.
    """
    log_ratio, advantages = log_ratio_to_old(predictions), predictions["advantages"]
    own = predictions.log_probs - predictions.log_probs.detach()
    ratio = bounded_exp(predictions.sequence_mean(log_ratio.detach()) + own)
    unclipped, clipped = ratio * advantages, clip(ratio, config) * advantages
    return -torch.minimum(unclipped, clipped), ratio_statistics(log_ratio, clipped < unclipped)


@policy_loss("gmpo", aggregation="sequence_mean_token_mean")
def gmpo(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
    """Geometric-mean policy optimisation (Zhao et al. 2025), bounds on the logarithm of the ratio.

        d_t = min(log r_t, clip_high)   if A > 0,      max(log r_t, -clip_low)   otherwise
        L = -A exp(1/|y| sum_t d_t)

    That is |A|^(1/|y|) taken |y| times, with the ratio of each token clipped to [e^-clip_low, e^clip_high] where PPO
    would clip it; one far token moves the mean little. The paper's bounds are 0.4. A is one number a sequence.
    Normaliser: sequence_mean_token_mean.
    """
    log_ratio, advantages = log_ratio_to_old(predictions), predictions["advantages"]
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=config.clip_high), log_ratio.clamp(min=-config.clip_low))
    ratio = bounded_exp(predictions.sequence_mean(bounded))
    return -advantages * ratio, ratio_statistics(log_ratio, bounded != log_ratio)
