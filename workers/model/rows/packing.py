"""Lay a micro-batch out in rows of cells: packed in one row, or padded to a row a sequence.

    sequences of 2, 4, 6, 1 tokens, multiple 4
    pack   0 0 p p 1 1 1 1 2 2 2 2 2 2 p p 3 p p p  p is padding
    pad    0 0 p p p p p p                          for models and backends that cannot keep the segments of a
           1 1 1 1 p p p p                          packed row apart
           2 2 2 2 2 2 p p
           3 p p p p p p p

Padding is at the end of a sequence, where causal attention hides it from every token. The checks refuse input
that a model would accept silently, or that would end in a CUDA assertion.

Shapes: T tokens of all sequences, B sequences, N predicted tokens (those with `loss_mask`), R rows of W
cells.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from balancing.basics.alignment import zigzag_positions
from workers.batch.dataproto import DataProto
from workers.errors import ConfigError, DataError

TEACHER_COLUMNS = ("teacher_hidden", "teacher_top_ids", "teacher_top_log_probs")
"""Token columns that the student's output layer reads, see `workers.model.losses.distillation`."""


def _same(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """Hold a micro-batch as the model reads it: rows of cells, or one rank's part of them.

    input_ids, position_ids: int64 [R, W]. Positions restart at 0 in every sequence. Padding holds 0 in both.
    M-RoPE has three positions a cell, [3, R, W].
    predicting: int64 [n], the cells whose hidden states predict a token. targets: int64 [n], its id. cells:
    int64 [T], the cell of each token, counted row by row, -1 on other ranks. Shared tokens have one cell.
    source: int64 [R * W], the token in each cell, along the ragged axis of the sequences, -1 for padding.

    teacher: columns of a teacher at the targets, [n, ...] each, those of `TEACHER_COLUMNS` that the sequences
    have.

    loss_positions: int64 [N], every token with `loss_mask`, along the ragged axis. sequence_index: int64 [N],
    its sequence. whole: values [n, ...] of this part -> [N, ...], on every rank that shares the rows.

    images: arguments of `Vision.features`, or None. image_cells, image_source: int64 [C], cells of this rank
    that take a feature, ascending, and which. image_features: the number of features that the images must
    have, 0 for any.

    degree: ranks that share the rows by choice of a plan, 1 without. counts: whether this rank's statistics
    count.

    attention: a `PackedAttention`, for a packed row. attention_mask: int64 [R, W], 1 at real tokens, for
    padded rows.
    """

    input_ids: Tensor
    position_ids: Tensor
    predicting: Tensor
    targets: Tensor
    cells: Tensor
    source: Tensor
    loss_positions: Tensor
    sequence_index: Tensor
    teacher: Mapping[str, Tensor] = field(default_factory=dict)
    whole: Callable[[Tensor], Tensor] = _same
    attention: Any = None
    attention_mask: Tensor | None = None
    images: Mapping[str, Tensor] | None = None
    image_cells: Tensor | None = None
    image_source: Tensor | None = None
    image_features: int = 0
    degree: int = 1
    counts: bool = True

    @property
    def shared(self) -> Sequence[int]:
        """Return the prefix tokens of each sequence that another sequence's cells compute."""
        return ()


@dataclass(frozen=True, kw_only=True)
class PackedRow(ModelInput):
    """Hold a micro-batch in one row (R = 1), sequence after sequence, each padded at its end to the
    alignment.

    lengths, padded_lengths: of the segments, without and with padding. Attention runs over whole padded
    segments, where no token sees the padding.
    """

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]

    def cells_of(self, context_parallel: int, context_rank: int) -> Tensor:
        """Return the cells of one context-parallel rank, int64 [W / cp]: segments r and 2*cp-1-r of each
        sequence.

        Raises LengthError if a padded length is not a multiple of 2*cp.
        """
        return torch.from_numpy(
            zigzag_positions(self.padded_lengths, context_parallel, context_rank)
        )


Rows = TypeVar("Rows", bound=ModelInput)


def pack(sequences: DataProto, multiple: int = 1, *, to_longest: bool = False) -> PackedRow:
    """Return the packed row of a micro-batch, on the CPU. Sequences are padded to multiples of `multiple`
    tokens.

    to_longest: pad all to the longest, as in the padded layout. Raises DataError if `loss_mask` marks the
    first token of a sequence, which nothing predicts.
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
    )


def pad(sequences: DataProto, multiple: int = 1) -> ModelInput:
    """Return a row for each sequence, on the CPU. W is the longest length rounded up to `multiple`.

    Raises DataError as `pack` does.
    """
    sequences = with_work(sequences)
    rows = len(sequences)
    width = int(round_up(sequences.lengths.max(), multiple))
    cells = sequence_cells(sequences, torch.arange(rows) * width)
    mask = torch.zeros(rows, width, dtype=torch.int64)
    mask.view(-1)[cells] = 1
    return ModelInput(**place(sequences, cells, (rows, width)), attention_mask=mask)


def with_work(sequences: DataProto) -> DataProto:
    if len(sequences):
        return sequences
    token = {
        "input_ids": torch.zeros(1, dtype=torch.int64),
        "loss_mask": torch.zeros(1, dtype=torch.bool),
    }
    return DataProto(torch.ones(1, dtype=torch.int64), token)


def sequence_cells(sequences: DataProto, first_cells: Tensor) -> Tensor:
    shift = first_cells - cumulative(sequences.lengths)[:-1]
    return torch.arange(sequences.num_tokens) + torch.repeat_interleave(
        shift, sequences.lengths
    )


def place(sequences: DataProto, cells: Tensor, shape: tuple[int, int]) -> dict[str, Any]:
    """Return the fields of a ModelInput of `shape` (R, W) with tokens in `cells` int64 [T]. Raises as `pack`
    does.
    """
    owner = sequences.owner
    starts = cumulative(sequences.lengths)[:-1]
    tokens = sequences.tokens["input_ids"].cpu()
    loss_mask = sequences.tokens["loss_mask"].cpu()
    if loss_mask[starts].any():
        index = int(loss_mask[starts].nonzero()[0])
        raise DataError(
            f"loss_mask marks the first token of sequence {index}, which no token predicts"
        )
    loss_positions = loss_mask.nonzero().squeeze(1)
    columns = [name for name in TEACHER_COLUMNS if name in sequences.tokens]
    return {
        "input_ids": _fill(cells, tokens, shape),
        "position_ids": _fill(cells, torch.arange(len(owner)) - starts[owner], shape),
        "source": _fill(cells, torch.arange(len(cells)) + 1, shape).flatten() - 1,
        "cells": cells,
        "loss_positions": loss_positions,
        "predicting": cells[loss_positions - 1],
        "targets": tokens[loss_positions],
        "teacher": {name: sequences.tokens[name][loss_positions] for name in columns},
        "sequence_index": owner[loss_positions],
    }


def read_last(rows: Rows, sequences: DataProto) -> Rows:
    """Return `rows` so that only the cell of each sequence's last token is read: N = B. `targets` is 0."""
    last = sequences.lengths.cumsum(0) - 1
    return read_own(
        replace(rows, loss_positions=last, sequence_index=torch.arange(len(sequences)))
    )


def read_own(rows: Rows) -> Rows:
    """Return `rows` so that the cell of each token with `loss_mask` is read, not the one before it. `targets`
    is 0.
    """
    predicting = rows.cells[rows.loss_positions]
    return replace(rows, predicting=predicting, targets=torch.zeros_like(predicting))


def cumulative(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def round_up(lengths: Tensor, multiple: int) -> Tensor:
    return -(-lengths // multiple) * multiple


def _fill(cells: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    filled = torch.zeros(shape, dtype=values.dtype)
    filled.view(-1)[cells] = values
    return filled


COLUMN_TYPES = {"input_ids": torch.int64, "loss_mask": torch.bool}
MicroBatch = tuple[int, int]
"""Rows start..stop-1 of a rank's sequences, none if start == stop."""


def check_tokenizer(tokenizer: Any, vocabulary: int, path: str) -> None:
    """Raise ConfigError if the tokenizer has ids beyond the model's embedding of `vocabulary` rows.

    A larger special token is fine, which transformers adds to some tokenizers: `check_sequences` refuses it
    when used.
    """
    special = set(tokenizer.all_special_tokens)
    ordinary = (
        (token, id) for token, id in tokenizer.get_vocab().items() if token not in special
    )
    token, largest = max(ordinary, key=lambda entry: entry[1])
    if largest >= vocabulary:
        raise ConfigError(
            f"model.path={path}: the tokenizer gives {token!r} the id {largest}, but the model embeds "
            f"{vocabulary} tokens. Use the tokenizer of this model."
        )


def max_positions(config: Any) -> int | None:
    """Return the longest sequence of the model's configuration, or None without limit or with scaled
    positions.
    """
    text = config.get_text_config()
    scaling = getattr(text, "rope_parameters", None) or {}
    if "factor" in scaling or any(
        isinstance(part, dict) and "factor" in part for part in scaling.values()
    ):
        return None
    positions: int | None = getattr(text, "max_position_embeddings", None)
    return positions if positions is None or positions > 0 else None  # XLNet says -1


def check_sequences(sequences: DataProto, vocabulary: int, positions: int | None) -> None:
    """Raise DataError for a missing column, a wrong dtype, or a sequence that is empty, too long or outside
    the vocabulary.
    """
    for name, dtype in COLUMN_TYPES.items():
        if name not in sequences.tokens:
            raise DataError(
                f"the batch has no column of tokens {name!r}. It has {sorted(sequences.tokens)}."
            )
        if sequences.tokens[name].dtype != dtype:
            raise DataError(
                f"column {name!r} must be of {dtype}, it is of {sequences.tokens[name].dtype}"
            )
    if not len(sequences):
        return
    if int(sequences.lengths.min()) < 1:
        raise DataError(f"sequence {int(sequences.lengths.argmin())} has no token")
    longest = int(sequences.lengths.argmax())
    if positions is not None and int(sequences.lengths[longest]) > positions:
        raise DataError(
            f"sequence {longest} has {int(sequences.lengths[longest])} tokens and the model takes "
            f"{positions} (max_position_embeddings). Lower data.max_prompt_tokens or "
            "rollout.sampling.max_new_tokens."
        )
    ids = sequences.tokens["input_ids"]
    outside = (ids < 0) | (ids >= vocabulary)
    if outside.any():
        position = int(outside.nonzero()[0])
        owner = int(sequences.owner[position])
        raise DataError(
            f"sequence {owner} holds the id {int(ids[position])}, and the model embeds {vocabulary} tokens. "
            "Use the tokenizer of this model."
        )


def check_micro_batches(
    micro_batches: Iterable[MicroBatch], rows: int, *, complete: bool
) -> None:
    expected = 0
    for start, stop in sorted(
        (start, stop) for start, stop in micro_batches if start != stop
    ):
        if start < expected or stop > rows or stop < start:
            raise DataError(
                f"micro-batch ({start}, {stop}) overlaps another or leaves the batch of {rows} sequences"
            )
        if complete and start != expected:
            raise DataError(f"no micro-batch holds the sequences {expected} to {start - 1}")
        expected = stop
    if complete and expected != rows:
        raise DataError(f"no micro-batch holds the sequences {expected} to {rows - 1}")
