"""Predictions without a model, and micro-batches of every shape, for the tests of losses."""

import itertools
import math

import torch
from torch import Tensor

from workers.batch.dataproto import DataProto
from workers.batch.metrics import results
from workers.config.roles import LossConfig
from workers.model.losses import (
    Denominators,
    LossFunction,
    Predictions,
    Statistics,
    make_policy_loss,
    to_metrics,
)
from workers.model.rows.packing import pack

ORDER = [7, 2, 10, 0, 5, 1, 3, 9, 6, 8, 4]
"""Of eleven sequences."""


def predictions_of(sequences: DataProto, log_probs: Tensor) -> Predictions:
    """As if the model gave `log_probs` [T]; the entropy is made up from them."""
    row = pack(sequences)
    chosen = log_probs[row.loss_positions]
    return Predictions.gather((chosen, 0.5 * chosen**2), sequences, row)


def logs(*values: float) -> list[float]:
    return [math.log(value) for value in values]


def tokens_of(
    log_probs: list[float],
    lengths: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
    **columns: list[float],
) -> Predictions:
    """Predicted tokens alone, in sequences of `lengths` (default: one sequence)."""
    lengths = lengths or [len(log_probs)]
    values = torch.tensor(log_probs, dtype=dtype, requires_grad=True)
    return Predictions(
        log_probs=values,
        entropy=torch.zeros_like(values).detach(),
        columns={
            name: torch.tensor(column, dtype=torch.bool if name == "held_back" else dtype)
            for name, column in columns.items()
        },
        sequence_index=torch.repeat_interleave(
            torch.arange(len(lengths)), torch.tensor(lengths)
        ),
        num_sequences=len(lengths),
    )


def loss_and_gradient(
    config: LossConfig,
    log_probs: list[float],
    lengths: list[int] | None = None,
    **columns: list[float],
) -> tuple[float, list[float], dict[str, float]]:
    """(loss, gradient of each token's log-prob, metrics) of `tokens_of`."""
    predictions = tokens_of(log_probs, lengths, **columns)
    denominators = Denominators(len(log_probs), predictions.num_sequences)
    loss, statistics = make_policy_loss(config)(predictions, denominators)
    loss.backward()
    gradient = predictions.log_probs.grad.tolist()
    return loss.item(), gradient, results(to_metrics([statistics]))


def with_log_probs(sequences: DataProto, seed: int = 0, spread: float = 0.5) -> DataProto:
    """The sequences with a column `log_probs`, those that the model is to give, around the old ones."""
    noise = torch.randn(
        sequences.num_tokens,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(seed),
    )
    log_probs = sequences.tokens["old_log_probs"] + spread * noise
    return DataProto(
        sequences.lengths, sequences.tokens | {"log_probs": log_probs}, sequences.columns
    )


def computed_in_parts(
    sequences: DataProto,
    cuts: list[int],
    loss_function: LossFunction,
    denominators: Denominators,
) -> tuple[float, list[Tensor], list[Statistics]]:
    """(loss, gradient of `log_probs` of each sequence, statistics) of a mini-batch cut into micro-batches at
    `cuts`.
    """
    total, gradients, statistics = 0.0, [], []
    for start, stop in itertools.pairwise(sorted([0, len(sequences), *cuts])):
        part = sequences.slice(start, stop)
        log_probs = part.tokens["log_probs"].clone().requires_grad_()
        loss, parts = loss_function(predictions_of(part, log_probs), denominators)
        loss.backward()
        total += loss.item()
        gradients += list(log_probs.grad.split(part.lengths.tolist()))
        statistics.append(parts)
    return total, gradients, statistics
