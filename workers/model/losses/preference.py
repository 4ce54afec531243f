"""Losses of several sequences together, such as of a pair, on single sequences: by the gradient of the whole.

    log-probs of all sequences (a forward pass) --loss on the driver--> dL/dS_i = c_i --this loss--> gradient

S_i is the log-prob of sequence i, the sum over its tokens. With c_i held fixed, sum_i c_i S_i has the gradient of L.
No sequence has to share a micro-batch with another: a plan balances single sequences, and a cap need not hold two.
"""

from torch import Tensor

from workers.model.losses.aggregation import Denominators
from workers.model.losses.predictions import Predictions
from workers.model.losses.statistics import Statistics, mean, total


def weighted_log_probs(predictions: Predictions, denominators: Denominators) -> tuple[Tensor, Statistics]:
    """sum_i c_i S_i, with c_i the column `coefficient` [B], into which every denominator has gone already."""
    del denominators
    coefficient = predictions["coefficient"].to(predictions.log_probs.dtype)
    loss = (coefficient * predictions.log_probs).sum()
    return loss, {"loss": total(loss), "entropy": mean(predictions.entropy)}
