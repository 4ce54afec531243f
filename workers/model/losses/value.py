"""Losses of value heads: a critic's values V_t of the state before token t, a reward model's scores s_t at
token t.

    values [N] + columns `returns`, `old_values` --value loss--> [N] --aggregate by Denominators--> loss
    scores [N] + column `label`                  --score loss--> [N] --mean over all scores-------> loss

N predicted tokens, or scores.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.batch.dataproto import DataProto
from workers.batch.metrics import Metric
from workers.config.roles import ValueLossConfig
from workers.model.losses.aggregation import Denominators, aggregate
from workers.model.losses.predictions import (
    PackedTokens,
    Statistics,
    columns_at,
    mean,
    total,
)
from workers.model.rows.packing import ModelInput


@dataclass(frozen=True, kw_only=True)
class ValuePredictions(PackedTokens):
    """Predictions of a value head. values: float32 [N] (float64 for a float64 model), with gradient."""

    values: Tensor

    @classmethod
    def gather(
        cls, values: Tensor, sequences: DataProto, rows: ModelInput
    ) -> "ValuePredictions":
        """Join the model's values [N] with the columns of the micro-batch."""
        return cls(values=values, **columns_at(sequences, rows, values.device))


ValueLossFunction = Callable[[ValuePredictions, Denominators], tuple[Tensor, Statistics]]


def make_value_loss(config: ValueLossConfig) -> ValueLossFunction:
    """Return the squared error, clipped as in PPO2 (Dhariwal et al. 2017, OpenAI Baselines) if `config.clip`
    > 0.

        L_t = 1/2 max((V_t - R_t)^2, (V_old_t + clip(V_t - V_old_t, -clip, clip) - R_t)^2)
        without clip:   L_t = 1/2 (V_t - R_t)^2

    Needs `returns`, and with a clip `old_values`, from before the first update on the batch.
    """

    def value_loss(
        predictions: ValuePredictions, denominators: Denominators
    ) -> tuple[Tensor, Statistics]:
        values = predictions.values
        returns = predictions["returns"]
        losses = 0.5 * (values - returns).square()
        statistics = value_statistics(values, returns)
        if config.clip:
            change = values - predictions["old_values"]
            clipped = predictions["old_values"] + change.clamp(-config.clip, config.clip)
            clipped_losses = 0.5 * (clipped - returns).square()
            statistics["value_clip_fraction"] = mean(
                (clipped_losses > losses).to(losses.dtype)
            )
            losses = torch.maximum(losses, clipped_losses)
        loss = aggregate(losses, predictions, denominators, config.aggregation)
        return loss, {"loss": total(loss), **statistics}

    return value_loss


def weighted_values(
    predictions: ValuePredictions, denominators: Denominators
) -> tuple[Tensor, Statistics]:
    """Return sum_i c_i s_i, with c_i the column `coefficient` [B], as `weighted_log_probs` does."""
    del denominators
    loss = (
        predictions["coefficient"].to(predictions.values.dtype) * predictions.values
    ).sum()
    return loss, {"loss": total(loss)}


def make_score_loss(name: str) -> ValueLossFunction:
    """Return the mean over all scores of `score_errors`."""

    def score_loss(
        predictions: ValuePredictions, denominators: Denominators
    ) -> tuple[Tensor, Statistics]:
        losses, statistics = score_errors(name, predictions)
        loss = aggregate(losses, predictions, denominators, "token_mean")
        return loss, {"loss": total(loss), **statistics}

    return score_loss


def score_errors(name: str, predictions: ValuePredictions) -> tuple[Tensor, Statistics]:
    """Return the loss of each score [N], and statistics, against the column `label` y.

    regression   (s - y)^2
    process      -y log sigmoid(s) - (1 - y) log sigmoid(-s)          Lightman et al. 2023
                 y: the chance of a right step
    """
    scores = predictions.values
    labels = predictions["label"].to(scores.dtype)
    if name == "regression":
        errors = scores - labels
        return errors.square(), {"absolute_error": mean(errors.abs())}
    right = (scores > 0) == (labels > 0.5)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        scores, labels, reduction="none"
    )
    return losses, {"accuracy": mean(right.to(scores.dtype))}


def value_statistics(values: Tensor, returns: Tensor) -> Statistics:
    """Return means in float64: variances are small differences."""
    returns, errors = returns.double(), (returns - values).detach().double()
    return {
        "values": mean(values.double()),
        "returns": mean(returns),
        "returns_square": mean(returns.square()),
        "value_error": mean(errors),
        "value_error_square": mean(errors.square()),
    }


def explained_variance(metrics: Mapping[str, Metric]) -> float:
    """Return 1 - Var(R - V) / Var(R) from merged `value_statistics`, or NaN if all returns are equal."""

    def variance(name: str) -> float:
        return metrics[f"{name}_square"].result() - metrics[name].result() ** 2

    of_returns = variance("returns")
    # Rounding leaves a little variance in equal returns.
    if of_returns <= 1e-12 * metrics["returns_square"].result():
        return math.nan
    return 1 - variance("value_error") / of_returns
