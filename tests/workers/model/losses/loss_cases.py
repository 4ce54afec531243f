"""Predictions without a model, and micro-batches of every shape, for the tests of losses."""

import itertools

import torch
from torch import Tensor

from workers.batch.dataproto import DataProto
from workers.model.losses import Denominators, LossFunction, Predictions, Statistics
from workers.model.rows.packing import pack


def predictions_of(sequences: DataProto, log_probs: Tensor) -> Predictions:
    """As if the model gave `log_probs` [T]; the entropy is made up from them."""
    row = pack(sequences)
    chosen = log_probs[row.loss_positions]
    return Predictions.gather((chosen, 0.5 * chosen**2), sequences, row)


def tokens_of(
    log_probs: list[float], lengths: list[int] | None = None, **columns: list[float]
) -> Predictions:
    """Predicted tokens alone, in sequences of `lengths` (default: one sequence), in float64."""
    lengths = lengths or [len(log_probs)]
    values = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    return Predictions(
        log_probs=values,
        entropy=torch.zeros_like(values).detach(),
        columns={
            name: torch.tensor(column, dtype=torch.float64)
            for name, column in columns.items()
        },
        sequence_index=torch.repeat_interleave(
            torch.arange(len(lengths)), torch.tensor(lengths)
        ),
        num_sequences=len(lengths),
    )


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
