"""Inputs of a loss, the outputs of a model and the columns at the predicted tokens, and its metrics on the
device.

    log_probs, entropy [N] + columns of the micro-batch --gather--> Predictions --sequences()--> a sequence's
    Statistic (0-d tensor, reduction) of each micro-batch --to_metrics: one copy for all--> Metrics, merged

N predicted tokens (those with `loss_mask`), B sequences of the micro-batch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from workers.batch.dataproto import ROUTED_EXPERTS, DataProto
from workers.batch.metrics import Metric, Metrics, Reduction, merge
from workers.errors import DataError
from workers.model.copies import to_device
from workers.model.rows.packing import TEACHER_COLUMNS, ModelInput

NOT_OF_LOSSES = {ROUTED_EXPERTS, *TEACHER_COLUMNS}
Tokens = TypeVar("Tokens", bound="PackedTokens")


@dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """Hold columns at the N predicted tokens of a micro-batch.

    columns: name -> [N]. Per-sequence columns repeat on each token. sequence_index: int64 [N], ascending, the
    sequence of each token. A sequence may have none. objects: non-numeric data such as `uid`, name -> object
    array [B]. meta: values of the whole batch, such as `step`.
    """

    columns: dict[str, Tensor]
    sequence_index: Tensor
    num_sequences: int
    objects: dict[str, np.ndarray] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        """Return a column [N]. Raises DataError if there is none."""
        if name in self.objects:
            raise DataError(
                f"the column {name!r} holds no numbers. The loss finds it in predictions.objects[{name!r}]."
            )
        if name not in self.columns:
            similar = get_close_matches(str(name), self.columns, n=1)
            hint = f"Did you mean {similar[0]!r}? " if similar else ""
            raise DataError(
                f"the loss needs the column {name!r}. {hint}The batch has {sorted(self.columns)}."
            )
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.sequence_index)

    @cached_property
    def sequence_lengths(self) -> Tensor:
        """Return int64 [B]."""
        # bincount reads the largest index on the host, which would wait for the device.
        counts = self.sequence_index.new_zeros(self.num_sequences)
        return counts.index_add_(
            0, self.sequence_index, torch.ones_like(self.sequence_index)
        )

    @cached_property
    def sequence_tokens(self) -> Tensor:
        """Return the length of each token's sequence, int64 [N]."""
        return self.sequence_lengths[self.sequence_index]

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Return the sum of [N] over each sequence, at each of its tokens: [N]."""
        sums = values.new_zeros(self.num_sequences).index_add(
            0, self.sequence_index, values
        )
        return sums[self.sequence_index]

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return the mean of [N] over each sequence, at each of its tokens: [N]."""
        return self.sequence_sum(values) / self.sequence_tokens.to(values.dtype)

    def _part(
        self: Tokens, sequence: int, start: int, stop: int, **outputs: Tensor
    ) -> Tokens:
        return replace(
            self,
            columns={name: values[start:stop] for name, values in self.columns.items()},
            sequence_index=torch.zeros_like(self.sequence_index[start:stop]),
            num_sequences=1,
            objects={
                name: values[sequence : sequence + 1]
                for name, values in self.objects.items()
            },
            **outputs,
        )

    def _bounds(self) -> Iterator[tuple[int, int, int]]:
        start = 0
        for sequence, length in enumerate(self.sequence_lengths.tolist()):
            if length:
                yield sequence, start, start + length
            start += length


@dataclass(frozen=True, kw_only=True)
class Predictions(PackedTokens):
    """Predictions of a language model. log_probs, entropy: float32 [N] (float64 for a float64 model), with
    gradient.

    divergence: from a teacher, see `workers.model.losses.divergence`, or None. hidden: states [N, H] at the
    output layer, with algorithm.loss.hidden_states.
    """

    log_probs: Tensor
    entropy: Tensor
    divergence: Tensor | None = None
    hidden: Tensor | None = None

    @classmethod
    def gather(
        cls, outputs: Sequence[Tensor], sequences: DataProto, rows: ModelInput
    ) -> "Predictions":
        """Join the model's outputs, in the order of the fields, with the columns of the micro-batch.

        Outputs are [N], but for the hidden states.
        """
        columns = dict(
            zip(
                ("log_probs", "entropy", "divergence"),
                (o for o in outputs if o.dim() == 1),
                strict=False,
            )
        )
        hidden = next((output for output in outputs if output.dim() == 2), None)
        return cls(
            **columns, hidden=hidden, **columns_at(sequences, rows, outputs[0].device)
        )

    def __getitem__(self, name: str) -> Tensor:
        """Return a column [N]. Before the only update on a batch, old log-probs are the current ones: ratios
        are 1.
        """
        if name == "old_log_probs" and name not in self.columns:
            return self.log_probs.detach()
        return super().__getitem__(name)

    def sequences(self) -> Iterator["Predictions"]:
        for sequence, start, stop in self._bounds():
            outputs = {"log_probs": self.log_probs, "entropy": self.entropy}
            outputs |= {"divergence": self.divergence, "hidden": self.hidden}
            columns = {
                name: values[start:stop]
                for name, values in outputs.items()
                if values is not None
            }
            yield self._part(sequence, start, stop, **columns)


def columns_at(
    sequences: DataProto, rows: ModelInput, device: torch.device
) -> dict[str, Any]:
    """Return the fields of `PackedTokens`, on `device`."""
    owner = rows.sequence_index
    columns = {name: values[owner] for name, values in sequences.columns.items()}
    read = {
        name: values
        for name, values in sequences.tokens.items()
        if name not in NOT_OF_LOSSES
    }
    columns |= {name: values[rows.loss_positions] for name, values in read.items()}
    sequence_index, *sent = to_device(device, owner, *columns.values())
    return {
        "columns": dict(zip(columns, sent, strict=True)),
        "sequence_index": sequence_index,
        "num_sequences": len(sequences),
        "objects": sequences.objects,
        "meta": sequences.meta,
    }


@dataclass(frozen=True)
class Statistic:
    """Hold a metric on the device: `value` is 0-d, `weight` and `count` are as in `Metric`."""

    reduction: Reduction
    value: Tensor
    weight: float = 0.0
    count: str = ""

    def merge_with(self, other: "Statistic") -> "Statistic":
        if self.reduction is Reduction.MAX:
            return replace(self, value=torch.maximum(self.value, other.value))
        if self.reduction is Reduction.MIN:
            return replace(self, value=torch.minimum(self.value, other.value))
        return replace(
            self, value=self.value + other.value, weight=self.weight + other.weight
        )


Statistics = dict[str, Statistic]


def total(value: Tensor) -> Statistic:
    return Statistic(Reduction.SUM, value.detach())


def mean(values: Tensor, count: str = "tokens") -> Statistic:
    """Return the mean of `values`, weighted by their number across micro-batches. count: `tokens` or
    `sequences`.
    """
    return Statistic(Reduction.MEAN, values.detach().sum(), len(values), count)


def extreme(name: str, values: Tensor, reduction: Reduction) -> Statistics:
    if not len(values):
        return {}
    value = values.max() if reduction is Reduction.MAX else values.min()
    return {name: Statistic(reduction, value.detach())}


def joined(parts: Iterable[Mapping[str, Statistic]]) -> Statistics:
    result: Statistics = {}
    for part in parts:
        for name, statistic in part.items():
            result[name] = (
                result[name].merge_with(statistic) if name in result else statistic
            )
    return result


def to_metrics(parts: Iterable[Mapping[str, Statistic]]) -> Metrics:
    """Merge the statistics of micro-batches, with one copy from the device."""
    named = [(name, statistic) for part in parts for name, statistic in part.items()]
    if not named:
        return {}
    values = (
        torch.stack([statistic.value.double() for _, statistic in named]).cpu().tolist()
    )
    return merge(
        {name: Metric(statistic.reduction, value, statistic.weight, statistic.count)}
        for (name, statistic), value in zip(named, values, strict=True)
    )
