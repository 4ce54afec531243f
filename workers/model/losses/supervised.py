"""Supervised fine-tuning on the same engine.

Losses of several sequences together, such as of a pair, on single sequences: by the gradient of the whole.

    log-probs of all sequences (a forward pass) --loss on the driver--> dL/dS_i = c_i --this loss--> gradient

S_i is the log-prob of sequence i, the sum over its tokens. With c_i held fixed, sum_i c_i S_i has the gradient of L.
No sequence has to share a micro-batch with another: a plan balances single sequences, and a cap need not hold two.
"""

from torch import Tensor

from workers.model.losses.aggregation import Denominators, aggregate
from workers.model.losses.predictions import Predictions, Statistics, mean, total
from workers.model.losses.registry import LossFunction


def make_sft_loss(aggregation: str = "token_mean", constant_length: int = 0) -> LossFunction:
    """Negative log-likelihood of the tokens with `loss_mask`, L_t = -log pi(y_t).

    aggregation, constant_length: the normaliser, see `token_weights`.
    """

    def sft(predictions: Predictions, denominators: Denominators) -> tuple[Tensor, Statistics]:
        loss = aggregate(-predictions.log_probs, predictions, denominators, aggregation, constant_length)
        return loss, {"loss": total(loss), "entropy": mean(predictions.entropy)}

    return sft


sft = make_sft_loss()
"""The loss of `make_sft_loss` with its defaults, the mean over the tokens of the mini-batch."""


def weighted_log_probs(predictions: Predictions, denominators: Denominators) -> tuple[Tensor, Statistics]:
    """sum_i c_i S_i, with c_i the column `coefficient` [B], into which every denominator has gone already."""
    del denominators
    coefficient = predictions["coefficient"].to(predictions.log_probs.dtype)
    loss = (coefficient * predictions.log_probs).sum()
    return loss, {"loss": total(loss), "entropy": mean(predictions.entropy)}
