"""Ragged sequences, and the packed row that the model reads.

    rows --from_list--> Sequences --slice--> Sequences of one micro-batch --pack--> PackedRow  --> model
                        (CPU, exact lengths)                              --pad---> PaddedRows     (padded.py)

    sequences of 2, 4, 6, 1 tokens, multiple 4:   0 0 p p 1 1 1 1 2 2 2 2 2 2 p p 3 p p p      (p is padding)
    cumulative lengths 0 2 6 12 13, padded 0 4 8 16 20

Shapes: T tokens of all sequences, B sequences, N predicted tokens (those with `loss_mask`), R rows of W cells.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from balancing.alignment import zigzag_positions
from workers.errors import DataError

COLUMN_TYPES = {"input_ids": torch.int64, "loss_mask": torch.bool}


@dataclass(frozen=True)
class Sequences:
    """B sequences concatenated along one ragged axis.

    lengths: int64 [B] on the CPU, each at least 1.
    tokens: per-token columns, name -> [T]. `input_ids` (int64) and `loss_mask` (bool, True where the policy produced
        the token) are always there; a pass may need `old_log_probs`, `reference_log_probs`, `rollout_log_probs`.
    columns: per-sequence columns, name -> [B], such as `advantages`.
    objects: per-sequence columns of anything else, name -> object array [B], such as `uid`.
    meta: values of the whole batch, such as `step`.

    Raises DataError if sizes disagree or a required column is missing.
    """

    lengths: Tensor
    tokens: dict[str, Tensor]
    columns: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, np.ndarray] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("input_ids", "loss_mask"):
            if name not in self.tokens:
                raise DataError(f"sequences have no per-token column {name!r}; they have {sorted(self.tokens)}")
        if len(self.lengths) and int(self.lengths.min()) < 1:
            raise DataError(f"sequence {int(self.lengths.argmin())} has no token")
        for name, dtype in COLUMN_TYPES.items():
            if self.tokens[name].dtype != dtype:
                raise DataError(f"column {name!r} must be of {dtype}, it is of {self.tokens[name].dtype}")
        _check_sizes(self.tokens, int(self.lengths.sum()), "tokens")
        _check_sizes(self.columns, len(self.lengths), "sequences")
        _check_sizes(self.objects, len(self.lengths), "sequences")

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
            {name: values[start:stop] for name, values in self.objects.items()},
            self.meta,
        )

    def to(self, device: torch.device | str) -> "Sequences":
        """The same sequences with their columns on `device`; `lengths` stay on the CPU."""
        return Sequences(
            self.lengths,
            {name: values.to(device) for name, values in self.tokens.items()},
            {name: values.to(device) for name, values in self.columns.items()},
            self.objects,
            self.meta,
        )


@dataclass(frozen=True)
class ModelInput:
    """One micro-batch as the model reads it, in rows of cells, and the places of its predicted tokens.

    input_ids, position_ids: int64 [R, W]; positions restart at 0 in every sequence; padding holds 0 in both.
    source: int64 [R, W], the token in each cell, counted along the ragged axis of the sequences; -1 for padding. Of
    tokens that sequences share, one of them.
    cells: int64 [T], the cell of each token, counted row by row; tokens that sequences share have one cell.
    loss_positions: int64 [N], every token with `loss_mask`, counted along the ragged axis of the sequences.
    predicting: int64 [N], the cell whose hidden state predicts it, counted row by row over the R * W cells.
    targets: int64 [N], its id. sequence_index: int64 [N], the sequence it belongs to.
    """

    input_ids: Tensor
    position_ids: Tensor
    source: Tensor
    cells: Tensor
    loss_positions: Tensor
    predicting: Tensor
    targets: Tensor
    sequence_index: Tensor

    @property
    def shared(self) -> Sequence[int]:
        """Tokens at the beginnings of sequences that another sequence's cells compute."""
        return ()


@dataclass(frozen=True)
class PackedRow(ModelInput):
    """A micro-batch in one row (R = 1), sequence after sequence, each padded at its end to the alignment.

    lengths, padded_lengths: of the sequences as Python integers, without and with the padding.
    cu_seqlens, cu_seqlens_padded: int32 [B + 1], their running sums from 0. A sequence's cells lie between the padded
    bounds; attention runs over whole padded segments, where no token sees the padding after it.
    """

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor

    @property
    def max_length(self) -> int:
        """Length of the longest padded segment."""
        return max(self.padded_lengths)

    def cells_of(self, context_parallel: int, context_rank: int) -> Tensor:
        """The cells that one context-parallel rank computes, int64 [W / cp]: segments r and 2*cp-1-r of each sequence.

        Sequence i lies in them at `cu_seqlens_padded // cp`. Raises LengthError if a padded length is not a multiple of
        2*cp.
        """
        return torch.from_numpy(zigzag_positions(self.padded_lengths, context_parallel, context_rank))


def pack(sequences: Sequences, multiple: int = 1, *, to_longest: bool = False) -> PackedRow:
    """The packed row of a micro-batch, on the CPU; each sequence is padded to a multiple of `multiple` tokens.

    to_longest: pad all to the longest, which gives the rows of the padded layout one after another.
    `balancing.alignment.length_multiple` is what context and tensor parallelism need; 1 is no padding at all.
    Raises DataError if `loss_mask` marks the first token of a sequence, which nothing predicts.
    """
    sequences = with_work(sequences)
    padded = round_up(sequences.lengths, multiple)
    padded = padded.max().expand(len(padded)) if to_longest else padded
    bounds = cumulative(padded)
    cells = sequence_cells(sequences, bounds[:-1])
    return PackedRow(
        **place(sequences, cells, (1, int(bounds[-1]))),
        lengths=tuple(sequences.lengths.tolist()),
        padded_lengths=tuple(padded.tolist()),
        cu_seqlens=cumulative(sequences.lengths).to(torch.int32),
        cu_seqlens_padded=bounds.to(torch.int32),
    )


def with_work(sequences: Sequences) -> Sequences:
    """`sequences`, or if there are none a sequence of one token that predicts nothing.

    A rank that has no work in a micro-step still has to take part in the gathering of parameters and the reduction of
    gradients.
    """
    if len(sequences):
        return sequences
    token = {"input_ids": torch.zeros(1, dtype=torch.int64), "loss_mask": torch.zeros(1, dtype=torch.bool)}
    return Sequences(torch.ones(1, dtype=torch.int64), token)


def sequence_cells(sequences: Sequences, first_cells: Tensor) -> Tensor:
    """The cell of every token, int64 [T], when sequence i lies in consecutive cells from `first_cells[i]` on."""
    shift = first_cells - cumulative(sequences.lengths)[:-1]
    return torch.arange(sequences.num_tokens) + torch.repeat_interleave(shift, sequences.lengths)


def place(sequences: Sequences, cells: Tensor, shape: tuple[int, int]) -> dict[str, Tensor]:
    """The fields of a ModelInput of `shape` (R, W) whose tokens lie in `cells` int64 [T].

    Raises DataError if `loss_mask` marks the first token of a sequence, which nothing predicts.
    """
    lengths, starts = sequences.lengths, cumulative(sequences.lengths)[:-1]
    tokens, loss_mask = sequences.tokens["input_ids"].cpu(), sequences.tokens["loss_mask"].cpu()
    if loss_mask[starts].any():
        index = int(loss_mask[starts].nonzero()[0])
        raise DataError(f"loss_mask marks the first token of sequence {index}, which no token predicts")
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    loss_positions = loss_mask.nonzero().squeeze(1)
    return {
        "input_ids": _fill(cells, tokens, shape),
        "position_ids": _fill(cells, torch.arange(len(owner)) - starts[owner], shape),
        "source": _fill(cells, torch.arange(len(cells)) + 1, shape) - 1,
        "cells": cells,
        "loss_positions": loss_positions,
        "predicting": cells[loss_positions - 1],
        "targets": tokens[loss_positions],
        "sequence_index": owner[loss_positions],
    }


def cumulative(lengths: Tensor) -> Tensor:
    """int64 [B + 1], the running sum from 0."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def round_up(lengths: Tensor, multiple: int) -> Tensor:
    """The smallest multiples of `multiple` that are not below `lengths`."""
    return -(-lengths // multiple) * multiple


def _fill(cells: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    filled = torch.zeros(shape, dtype=values.dtype)
    filled.view(-1)[cells] = values
    return filled


def _check_sizes(columns: Mapping[str, Tensor | np.ndarray], size: int, what: str) -> None:
    for name, values in columns.items():
        if len(values) != size:
            raise DataError(f"column {name!r} holds {len(values)} values for {size} {what}")


def _typed(tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ids and mask in the types that indexing needs, whatever narrower type they travelled in.

    Numbers with a fraction are left as they are, to be refused.
    """
    whole = {name for name, values in tokens.items() if name in COLUMN_TYPES and not values.is_floating_point()}
    return {name: values.to(COLUMN_TYPES[name]) if name in whole else values for name, values in tokens.items()}
