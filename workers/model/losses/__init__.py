"""Losses that do not depend on how a mini-batch is split.

    Predictions of one micro-batch --loss function + Denominators of the mini-batch--> (loss, statistics)

A loss function returns the micro-batch's SUM divided by the mini-batch's global denominators. Losses and
gradients add up over micro-batches and ranks to the mini-batch's, however the batch was split.

    predictions.py   a loss's inputs: the packed row, or whole sequences, and metrics on the device
    aggregation.py   denominators, and token losses to one number
    registry.py      LossConfig to the function, and how to register a custom loss
    ratio_losses.py  reinforce, ppo_clip, cispo, sapo, gspo, gmpo        clip_cov.py    clip_cov, kl_cov
    sums.py          sums over tokens, without denominators
    supervised.py    sft, and weighted_log_probs for losses of pairs     value.py       value heads
    correction.py    sampler against trainer: weights, rejection         kl.py          estimators of a KL
    returns.py       token rewards, advantages and returns
"""

from workers.model.losses.aggregation import Denominators, group_tokens, token_weights
from workers.model.losses.clip_cov import hold_back
from workers.model.losses.correction import correction_weights, rollout_mismatch
from workers.model.losses.kl import kl_estimate, kl_of_loss
from workers.model.losses.predictions import (
    Predictions,
    Statistic,
    Statistics,
    mean,
    to_metrics,
    total,
)
from workers.model.losses.ratio_losses import ppo_clip
from workers.model.losses.registry import (
    POLICY_LOSSES,
    LossFunction,
    make_policy_loss,
    per_sequence_loss,
    policy_loss,
    prepare,
)
from workers.model.losses.sums import make_sum_loss
from workers.model.losses.supervised import make_sft_loss, sft, weighted_log_probs
from workers.model.losses.value import (
    ValueLossFunction,
    ValuePredictions,
    explained_variance,
    make_score_loss,
    make_value_loss,
    score_errors,
    value_statistics,
    weighted_values,
)

__all__ = [
    "POLICY_LOSSES",
    "Denominators",
    "LossFunction",
    "Predictions",
    "Statistic",
    "Statistics",
    "ValueLossFunction",
    "ValuePredictions",
    "correction_weights",
    "explained_variance",
    "group_tokens",
    "hold_back",
    "kl_estimate",
    "kl_of_loss",
    "make_policy_loss",
    "make_score_loss",
    "make_sft_loss",
    "make_sum_loss",
    "make_value_loss",
    "mean",
    "per_sequence_loss",
    "policy_loss",
    "ppo_clip",
    "prepare",
    "rollout_mismatch",
    "score_errors",
    "sft",
    "to_metrics",
    "token_weights",
    "total",
    "value_statistics",
    "weighted_log_probs",
    "weighted_values",
]
