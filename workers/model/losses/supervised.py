"""Supervised fine-tuning on the same engine."""

from torch import Tensor

from workers.model.losses.aggregation import Denominators, aggregate
from workers.model.losses.predictions import Predictions
from workers.model.losses.registry import LossFunction
from workers.model.losses.statistics import Statistics, mean, total


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
