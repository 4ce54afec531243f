"""Refuses input by name that a model would take silently, or that would end in a CUDA assertion."""

from collections.abc import Iterable
from typing import Any

import torch

from workers.dataproto import DataProto
from workers.errors import ConfigError, DataError

COLUMN_TYPES = {"input_ids": torch.int64, "loss_mask": torch.bool}
MicroBatch = tuple[int, int]
"""Rows start..stop-1 of the sequences of a rank; start == stop is a micro-batch without work."""


def check_tokenizer(tokenizer: Any, vocabulary: int, path: str) -> None:
    """Raise ConfigError if the tokenizer makes ids that the model has no embedding for. vocabulary: embedding rows.

    A smaller tokenizer is fine: models round their embeddings up. So is a special token beyond, which transformers adds
    to some tokenizers by itself: it does no harm until it is used, and `check_sequences` sees that.
    """
    special = set(tokenizer.all_special_tokens)
    ordinary = ((token, id) for token, id in tokenizer.get_vocab().items() if token not in special)
    token, largest = max(ordinary, key=lambda entry: entry[1])
    if largest >= vocabulary:
        raise ConfigError(
            f"model.path={path}: the tokenizer gives {token!r} the id {largest}, but the model embeds {vocabulary} "
            "tokens; model and tokenizer are not of one another."
        )


def max_positions(config: Any) -> int | None:
    """Longest sequence that the model's configuration allows; None if it sets no limit or scales its positions."""
    text = config.get_text_config()
    scaling = getattr(text, "rope_parameters", None) or {}
    if "factor" in scaling or any(isinstance(part, dict) and "factor" in part for part in scaling.values()):
        return None
    positions: int | None = getattr(text, "max_position_embeddings", None)
    return positions if positions is None or positions > 0 else None  # XLNet says -1


def check_sequences(sequences: DataProto, vocabulary: int, positions: int | None) -> None:
    """Raise DataError if a column is missing or of a wrong type, or for the first sequence that is empty, longer than
    `positions` or has an id outside the vocabulary."""
    for name, dtype in COLUMN_TYPES.items():
        if name not in sequences.tokens:
            raise DataError(f"the batch has no column of tokens {name!r}; it has {sorted(sequences.tokens)}")
        if sequences.tokens[name].dtype != dtype:
            raise DataError(f"column {name!r} must be of {dtype}, it is of {sequences.tokens[name].dtype}")
    if not len(sequences):
        return
    if int(sequences.lengths.min()) < 1:
        raise DataError(f"sequence {int(sequences.lengths.argmin())} has no token")
    longest = int(sequences.lengths.argmax())
    if positions is not None and int(sequences.lengths[longest]) > positions:
        raise DataError(
            f"sequence {longest} has {int(sequences.lengths[longest])} tokens and the model takes {positions} "
            "(max_position_embeddings); lower data.max_prompt_tokens or rollout.sampling.max_new_tokens."
        )
    ids = sequences.tokens["input_ids"]
    outside = (ids < 0) | (ids >= vocabulary)
    if outside.any():
        position = int(outside.nonzero()[0])
        owner = int(sequences.owner[position])
        raise DataError(
            f"sequence {owner} holds the id {int(ids[position])}, and the model embeds {vocabulary} tokens; the "
            "tokenizer that made it is not this model's."
        )


def check_micro_batches(micro_batches: Iterable[MicroBatch], rows: int, *, complete: bool) -> None:
    """Raise DataError unless they hold every row at most once and, with `complete`, every row of the batch."""
    expected = 0
    for start, stop in sorted((start, stop) for start, stop in micro_batches if start != stop):
        if start < expected or stop > rows or stop < start:
            raise DataError(f"micro-batch ({start}, {stop}) overlaps another or leaves the batch of {rows} sequences")
        if complete and start != expected:
            raise DataError(f"no micro-batch holds the sequences {expected} to {start - 1}")
        expected = stop
    if complete and expected != rows:
        raise DataError(f"no micro-batch holds the sequences {expected} to {rows - 1}")
