"""Refuses input by name that a model would take silently, or that would end in a CUDA assertion."""

from collections.abc import Iterable
from typing import Any

from workers.errors import ConfigError, DataError
from workers.model.packing import Sequences

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


def check_sequences(sequences: Sequences, vocabulary: int, positions: int | None) -> None:
    """Raise DataError that names the first sequence with an id outside the vocabulary, or longer than `positions`."""
    if not len(sequences):
        return
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
        owner = int((sequences.lengths.cumsum(0) <= position).sum())
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
