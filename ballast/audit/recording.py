"""Write a bundle from lists or arrays of any trainer.

rows of token ids, log-probs, rewards, settings --make_bundle--> a bundle --record--> runs/audit/step-12/
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ballast.audit.bundle import (
    ROW_COLUMNS,
    TOKEN_COLUMNS,
    Algorithm,
    Bundle,
    Facts,
    Named,
)
from ballast.audit.bundle_files import write_bundle
from workers.errors import DataError


def record(folder: str | Path, **step: Any) -> Path:
    """Write a step as a bundle, `folder`, and return its path. The arguments are those of `make_bundle`.

    Raises DataError for what does not fit together, OutputError if it cannot be written.
    """
    return write_bundle(folder, make_bundle(**step))


def make_bundle(
    *,
    step: int,
    token_ids: Sequence[Any],
    loss_mask: Sequence[Any],
    algorithm: Mapping[str, Any] | None = None,
    loss: float | Sequence[float] | None = None,
    gradient_norm: float | Sequence[float] | None = None,
    denominators: Mapping[str, Any] | None = None,
    model: Mapping[str, str] | None = None,
    template: Mapping[str, str] | None = None,
    weight_version: int | None = None,
    learning_rate: float | None = None,
    sampled: int | None = None,
    dropped: Mapping[str, int] | None = None,
    end_tokens: Sequence[int] = (),
    precision: str = "",
    writer: str = "",
    missing: Mapping[str, str] | None = None,
    **columns: Any,
) -> Bundle:
    """Return a step as a bundle in memory. docs/audit.md describes every argument.

    token_ids, loss_mask and other token columns: a list with the tokens of each row. Row columns: a number
    for each row. `advantages` may have a number for each row, which stands for all of its tokens. None
    means missing. Raises DataError for what does not fit together.
    """
    lengths = [len(row) for row in token_ids]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    columns = {"token_ids": token_ids, "loss_mask": loss_mask} | columns
    tokens = {}
    rows = {}
    for name, values in columns.items():
        if values is None:
            continue
        if name in ROW_COLUMNS:
            rows[name] = _row_column(name, values, len(lengths))
        elif name in TOKEN_COLUMNS:
            tokens[name] = _token_column(name, values, lengths)
        else:
            known = ", ".join((*TOKEN_COLUMNS, *ROW_COLUMNS))
            raise DataError(f"{name}: not a column of a bundle. Known are {known}.")
    denominators = denominators or {}
    facts = Facts(
        step=step,
        algorithm=read_algorithm(algorithm or {}),
        loss=_numbers("loss", loss),
        gradient_norm=_numbers("gradient_norm", gradient_norm),
        token_denominators=_numbers("denominators.tokens", denominators.get("tokens")),
        sequence_denominators=_numbers(
            "denominators.sequences", denominators.get("sequences")
        ),
        model=Named(**(model or {})),
        template=Named(**(template or {})),
        weight_version=weight_version,
        learning_rate=learning_rate,
        sampled=sampled,
        dropped=dict(dropped or {}),
        end_tokens=tuple(int(token) for token in end_tokens),
        precision=precision,
        writer=writer,
        missing=dict(missing or {}),
    )
    return Bundle(facts, offsets, tokens, rows)


def read_algorithm(settings: Mapping[str, Any]) -> Algorithm:
    """Return settings by name as an Algorithm. Raises DataError for an unknown name."""
    known = [setting.name for setting in fields(Algorithm)]
    for name in settings:
        if name not in known:
            raise DataError(
                f"algorithm.{name}: not a setting of a bundle. Known are {', '.join(known)}."
            )
    return replace(Algorithm(), **settings)


def _row_column(name: str, values: Any, count: int) -> np.ndarray:
    column = _as_array(name, values, ROW_COLUMNS[name])
    if column.shape != (count,):
        raise DataError(
            f"{name}: {len(column)} values for {count} rows. Give one for each row."
        )
    return column


def _token_column(name: str, values: Any, lengths: Sequence[int]) -> np.ndarray:
    column_type = TOKEN_COLUMNS[name]
    if len(values) != len(lengths):
        raise DataError(
            f"{name}: {len(values)} rows, but token_ids has {len(lengths)}. Give one for each."
        )
    if name == "advantages" and all(np.ndim(value) == 0 for value in values):
        return np.repeat(_as_array(name, values, column_type), lengths)
    parts = [_as_array(name, row, column_type) for row in values]
    for number, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        if part.shape != (length,):
            raise DataError(
                f"{name}: row {number} has {part.size} values, but {length} tokens. "
                "Give one for each token of prompt and response, 0 where nothing was predicted."
            )
    return np.concatenate(parts) if parts else np.empty(0, column_type)


def _as_array(name: str, values: Any, column_type: type) -> np.ndarray:
    try:
        return np.asarray(values, column_type)
    except (TypeError, ValueError, OverflowError):
        raise DataError(
            f"{name}: not numbers of the type {column_type.__name__}. Give a list of them."
        ) from None


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    if value is None:
        return ()
    return tuple(
        float(number) for number in np.atleast_1d(_as_array(name, value, np.float64))
    )
