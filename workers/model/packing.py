"""Ragged sequences and the packed row that the model reads.

    rows --from_list--> Sequences --slice--> Sequences of one micro-batch --pack--> PackedRow --> model
                        (CPU, exact lengths)                                        (one row, no padding)

Shapes: T tokens of all sequences, B sequences, N predicted tokens (those with `loss_mask`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workers.errors import DataError


@dataclass(frozen=True)
class Sequences:
    """B sequences concatenated along one ragged axis.

    lengths: int64 [B] on the CPU, each at least 1.
    tokens: per-token columns, name -> [T]. `input_ids` (int64) and `loss_mask` (bool, True where the policy produced
        the token) are always there; a pass may need `old_log_probs`, `reference_log_probs`, `rollout_log_probs`.
    columns: per-sequence columns, name -> [B], such as `advantages`.

    Raises DataError if sizes disagree or a required column is missing.
    """

    lengths: Tensor
    tokens: dict[str, Tensor]
    columns: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("input_ids", "loss_mask"):
            if name not in self.tokens:
                raise DataError(f"sequences have no per-token column {name!r}; they have {sorted(self.tokens)}")
        if len(self.lengths) and int(self.lengths.min()) < 1:
            raise DataError(f"sequence {int(self.lengths.argmin())} has no token")
        _check_sizes(self.tokens, int(self.lengths.sum()), "tokens")
        _check_sizes(self.columns, len(self.lengths), "sequences")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens["input_ids"])

    @property
    def num_loss_tokens(self) -> int:
        return int(self.tokens["loss_mask"].sum())

    @classmethod
    def from_list(cls, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Any] | None = None) -> "Sequences":
        """Concatenate rows; each holds the same per-token columns as 1-D arrays, tensors or lists of one length.

        Raises DataError if the columns of a row differ in name from the first row's, or in length from one another.
        """
        if not rows:
            raise DataError("a batch needs at least one sequence")
        parts: dict[str, list[Tensor]] = {name: [] for name in rows[0]}
        for index, row in enumerate(rows):
            if set(row) != set(parts):
                raise DataError(f"sequence {index} has columns {sorted(row)}, the first has {sorted(parts)}")
            sizes = {name: len(row[name]) for name in parts}
            if len(set(sizes.values())) > 1:
                raise DataError(f"sequence {index} has columns of different lengths: {sizes}")
            for name, values in row.items():
                parts[name].append(torch.as_tensor(values))
        lengths = torch.tensor([len(part) for part in next(iter(parts.values()))], dtype=torch.int64)
        tokens = {name: torch.cat(part) for name, part in parts.items()}
        return cls(lengths, _typed(tokens), {name: torch.as_tensor(values) for name, values in (columns or {}).items()})

    def slice(self, start: int, stop: int) -> "Sequences":
        """Rows start..stop-1 as views; the sequences of one micro-batch."""
        first = int(self.lengths[:start].sum())
        last = first + int(self.lengths[start:stop].sum())
        return Sequences(
            self.lengths[start:stop],
            {name: values[first:last] for name, values in self.tokens.items()},
            {name: values[start:stop] for name, values in self.columns.items()},
        )

    def to(self, device: torch.device | str) -> "Sequences":
        """The same sequences with their columns on `device`; `lengths` stay on the CPU."""
        return Sequences(
            self.lengths,
            {name: values.to(device) for name, values in self.tokens.items()},
            {name: values.to(device) for name, values in self.columns.items()},
        )


@dataclass(frozen=True)
class PackedRow:
    """One micro-batch as the model reads it, and where its predicted tokens stand.

    input_ids, position_ids: int64 [1, T]; positions restart at 0 in every sequence.
    lengths: the segments' lengths as Python integers; cu_seqlens: int32 [B + 1], their running sum from 0.
    loss_positions: int64 [N], index of every token with `loss_mask`; the hidden state one before it predicts it.
    sequence_index: int64 [N], the sequence each predicted token belongs to.
    """

    input_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    loss_positions: Tensor
    sequence_index: Tensor

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @property
    def targets(self) -> Tensor:
        """Ids of the predicted tokens, int64 [N]."""
        return self.input_ids[0, self.loss_positions]


def pack(sequences: Sequences) -> PackedRow:
    """The packed row of a micro-batch, on the CPU.

    A micro-batch without sequences becomes a row of one token that predicts nothing: a rank that has no work in a
    micro-step still has to take part in the gathering of parameters and the reduction of gradients.

    Raises DataError if `loss_mask` marks the first token of a sequence, which nothing predicts.
    """
    if not len(sequences):
        return _row_without_sequences()
    lengths = sequences.lengths
    ends = lengths.cumsum(0)
    starts = ends - lengths
    loss_mask = sequences.tokens["loss_mask"].cpu()
    if loss_mask[starts].any():
        index = int(loss_mask[starts].nonzero()[0])
        raise DataError(f"loss_mask marks the first token of sequence {index}, which no token predicts")
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    loss_positions = loss_mask.nonzero().squeeze(1)
    return PackedRow(
        input_ids=sequences.tokens["input_ids"].cpu().unsqueeze(0),
        position_ids=(torch.arange(len(owner)) - starts[owner]).unsqueeze(0),
        lengths=tuple(lengths.tolist()),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
        loss_positions=loss_positions,
        sequence_index=owner[loss_positions],
    )


def _row_without_sequences() -> PackedRow:
    nothing = torch.empty(0, dtype=torch.int64)
    token = torch.zeros(1, 1, dtype=torch.int64)
    return PackedRow(token, token, (1,), torch.tensor([0, 1], dtype=torch.int32), nothing, nothing)


def _check_sizes(columns: Mapping[str, Tensor], size: int, what: str) -> None:
    for name, values in columns.items():
        if len(values) != size:
            raise DataError(f"column {name!r} holds {len(values)} values for {size} {what}")


def _typed(tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ids and mask in the types that indexing needs, whatever narrower type they travelled in."""
    types = {"input_ids": torch.int64, "loss_mask": torch.bool}
    return {name: values.to(types.get(name, values.dtype)) for name, values in tokens.items()}
