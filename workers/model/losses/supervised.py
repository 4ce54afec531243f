"""Supervised fine-tuning, and losses of several sequences (pairs) by single sequences.

    log-probs of all sequences (a forward pass) --loss on the driver--> dL/dS_i = c_i --this loss--> gradient

S_i is the log-prob of sequence i. With c_i fixed, sum_i c_i S_i has the gradient of L. So the sequences of a
pair may be in different micro-batches.
"""

from torch import Tensor

from workers.model.losses.aggregation import Denominators, aggregate
from workers.model.losses.predictions import Predictions, Statistics, mean, total
from workers.model.losses.registry import LossFunction


def make_sft_loss(
    aggregation: str = "token_mean", constant_length: int = 0
) -> LossFunction:
    """Return the negative log-likelihood, L_t = -log pi(y_t), with a normaliser of `token_weights`."""

    def sft(
        predictions: Predictions, denominators: Denominators
    ) -> tuple[Tensor, Statistics]:
        loss = aggregate(
            -predictions.log_probs, predictions, denominators, aggregation, constant_length
        )
        return loss, {"loss": total(loss), "entropy": mean(predictions.entropy)}

    return sft


sft = make_sft_loss()
"""The mean over the tokens of the mini-batch."""


def weighted_log_probs(
    predictions: Predictions, denominators: Denominators
) -> tuple[Tensor, Statistics]:
    """Return sum_i c_i S_i, with c_i the column `coefficient` [B], which includes every denominator."""
    del denominators
    coefficient = predictions["coefficient"].to(predictions.log_probs.dtype)
    loss = (coefficient * predictions.log_probs).sum()
    return loss, {"loss": total(loss), "entropy": mean(predictions.entropy)}
