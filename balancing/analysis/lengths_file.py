"""Reads sequence lengths from files.

    .json    [512, 90, ...]   [{"length": 512}, ...]   {"lengths": [512, ...]}
    .jsonl   one number or one object per line
    .csv     a header with the column, or a single column of numbers without a header
    .parquet the column
    folder   a run: its lengths.jsonl, one {"step": 7, "lengths": [...]} per line (run_plan.py reads the rest of it)

`column` defaults to the first of `COLUMNS` in the file. If its values are lists, such as `input_ids`, their numbers of
entries are the lengths.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancing.analysis.json_records import has_step, json_records
from balancing.errors import LengthFileError
from balancing.validation import whole_numbers

COLUMNS = ("length", "lengths", "tokens", "num_tokens", "total_tokens")
RUN_RECORD = "lengths.jsonl"
"""File in the folder of a run with the lengths of every step."""


def read_lengths(
    path: Path, *, column: str | None = None, step: int | None = None, minimum: int = 1
) -> NDArray[np.int64]:
    """int64 [n], n >= 1, the lengths in a file, or those of one step of a run (None is its last).

    Raises LengthFileError, which names file and line, for a file that is missing, of an unknown kind, without the
    column or without lengths; LengthError for lengths below `minimum`.
    """
    values = list(run_step(path, step).get("lengths", [])) if path.is_dir() else read_column(path, column)
    if not values:
        raise LengthFileError(f"{path} holds no lengths; give a file with at least one")
    try:
        numbers = [_number(value) for value in values]
    except (TypeError, ValueError) as problem:
        raise LengthFileError(f"{path} holds a length that is not a number: {problem}") from None
    return whole_numbers(numbers, f"lengths in {path}", minimum=minimum)


def run_step(folder: Path, step: int | None = None) -> Mapping[str, Any]:
    """The record of one step of a run (None is its last), empty if it has none; raises as `read_lengths` does."""
    path = folder / RUN_RECORD
    if not path.is_file():
        raise LengthFileError(f"{path} is not there; the run has recorded no lengths, so give a file of them instead")
    steps = {record["step"]: record for _, record in json_records(path, has_step, check_lengths)}
    if not steps:
        return {}
    wanted = max(steps) if step is None else step
    if wanted not in steps:
        raise LengthFileError(f"{path} has no step {step}; its steps are {min(steps)} to {max(steps)}")
    return steps[wanted]


def check_lengths(record: Mapping[str, Any]) -> None:
    """Raise unless a run's record has lengths, and other columns of as many whole numbers."""
    columns = [whole_numbers(record[name], name, minimum=0) for name in record.keys() - {"step", "plan"}]
    whole_numbers(record["lengths"], "lengths", minimum=1)
    if len({len(column) for column in columns}) != 1:
        raise LengthFileError("its columns are not equally long")


def read_json(path: Path) -> Any:
    """The content of a JSON file; LengthFileError if it is missing or not JSON."""
    try:
        return json.loads(_text(path))
    except json.JSONDecodeError as problem:
        raise LengthFileError(f"{path} is not JSON: {problem}") from None


def read_column(path: Path, column: str | None) -> list[Any]:
    """The values of a column of a file, of any type; raises as `read_lengths` does."""
    kind = path.suffix.lower()
    if kind not in _READERS:
        raise LengthFileError(f"{path} is of an unknown kind; give a folder or one of {', '.join(_READERS)}")
    return list(_READERS[kind](path, column))


def _from_json(path: Path, column: str | None) -> Sequence[Any]:
    document = read_json(path)
    if isinstance(document, Mapping):
        document = _field(document, column, str(path))
    if not isinstance(document, list):
        raise LengthFileError(f"{path} holds no list; give a list of lengths, or of objects with a length")
    return [_entry(entry, column, f"{path}, entry {number}") for number, entry in enumerate(document)]


def _from_json_lines(path: Path, column: str | None) -> list[Any]:
    return [_entry(entry, column, f"{path}, line {number}") for number, entry in _json_lines(path)]


def _json_lines(path: Path) -> Iterable[tuple[int, Any]]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as problem:
                raise LengthFileError(f"{path}, line {number} is not JSON: {problem.msg}") from None


def _from_csv(path: Path, column: str | None) -> list[str]:
    rows = [row for row in csv.reader(io.StringIO(_text(path), newline="")) if row]
    if not rows:
        return []
    if column is None and len(rows[0]) == 1 and _is_number(rows[0][0]):
        return [row[0] for row in rows]
    header = [name.strip() for name in rows[0]]
    position = header.index(_column(header, column, str(path)))
    short = [number for number, row in enumerate(rows) if len(row) <= position]
    if short:
        raise LengthFileError(f"{path}, row {short[0] + 1} has no column {header[position]!r}")
    return [row[position] for row in rows[1:]]


def _from_parquet(path: Path, column: str | None) -> list[Any]:
    from pyarrow import ArrowInvalid, parquet  # slow to import

    try:
        name = _column(parquet.read_schema(path).names, column, str(path))
        return list(parquet.read_table(path, columns=[name])[name].to_pylist())
    except (ArrowInvalid, FileNotFoundError) as problem:
        raise LengthFileError(f"{path} cannot be read as Parquet: {problem}") from None


_READERS = {".json": _from_json, ".jsonl": _from_json_lines, ".csv": _from_csv, ".parquet": _from_parquet}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise LengthFileError(f"{path} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise LengthFileError(f"{path} is not text in UTF-8") from None


def _entry(entry: Any, column: str | None, place: str) -> Any:
    return _field(entry, column, place) if isinstance(entry, Mapping) else entry


def _field(entry: Mapping[str, Any], column: str | None, place: str) -> Any:
    return entry[_column(list(entry), column, place)]


def _column(names: Sequence[str], column: str | None, place: str) -> str:
    """The column to read; LengthFileError that lists the columns if it is missing."""
    for name in (column,) if column is not None else COLUMNS:
        if name in names:
            return name
    wanted = repr(column) if column is not None else " or ".join(map(repr, COLUMNS))
    raise LengthFileError(f"{place} has no column {wanted}, only {', '.join(map(repr, names))}; name one with --column")


def _number(value: Any) -> float:
    """A length, or the number of entries of a list."""
    if isinstance(value, bool) or value is None:
        raise ValueError(repr(value))
    return float(len(value)) if isinstance(value, list) else float(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
