"""Read sequence lengths from files, and the plans that a run records next to its lengths.

    .json    [512, 90, ...]   [{"length": 512}, ...]   {"lengths": [512, ...]}
    .jsonl   one number or one object per line
    .csv     a header with the column, or a single column of numbers without a header
    .parquet the column
    folder   a run: lengths.jsonl, a line {"step": 7, "lengths": [...], "mini_batch": [...], "plan": {...}}

`column` defaults to the first of `COLUMNS` in the file. The length of a list, such as `input_ids`, is its
size.
"""

import csv
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancing.basics.validation import whole_numbers
from balancing.context_degrees import ContextDegrees
from balancing.cost_model import CostModel
from balancing.errors import LengthFileError
from balancing.pipelines.pipeline import Pipeline
from balancing.plan import Plan
from balancing.plan_settings import Settings

log = logging.getLogger(__name__)

COLUMNS = ("length", "lengths", "tokens", "num_tokens", "total_tokens")
PREFIXES = ("prefix_groups", "prefix_lengths", "tree_order", "tree_depths")
"""Prefix arguments of `plan_batch`, and their names in lengths.jsonl."""
LATEST_STEP = 2**53  # larger numbers are not exact in a chart


def read_lengths(
    path: Path, *, column: str | None = None, step: int | None = None, minimum: int = 1
) -> NDArray[np.int64]:
    """Read the lengths of a file, or of one step of a run (None is its last): int64 [n], n >= 1.

    Raises LengthFileError, which names the file, and LengthError for lengths below `minimum`.
    """
    values = (
        list(run_step(path, step).get("lengths", []))
        if path.is_dir()
        else read_column(path, column)
    )
    if not values:
        raise LengthFileError(f"{path} holds no lengths. Give a file with at least one.")
    try:
        numbers = [_number(value) for value in values]
    except (TypeError, ValueError) as problem:
        raise LengthFileError(
            f"{path} holds a length that is not a number: {problem}"
        ) from None
    return whole_numbers(numbers, f"lengths in {path}", minimum=minimum)


def read_column(path: Path, column: str | None) -> list[Any]:
    """Return a column's values, of any type. Raises as `read_lengths`."""
    kind = path.suffix.lower()
    if not os.path.lexists(path):
        raise LengthFileError(
            f"{path} is not there. Give a folder, .json, .jsonl, .csv or .parquet."
        )
    if kind == ".parquet":
        return _from_parquet(path, column)
    if kind == ".json":
        entries = read_json(path)
        entries = (
            _value(entries, column, str(path)) if isinstance(entries, Mapping) else entries
        )
    elif kind == ".jsonl":
        lines = enumerate(_text(path).split("\n"), start=1)
        entries = [
            _parsed(line, f"{path}, line {number}")
            for number, line in lines
            if line.strip()
        ]
    elif kind == ".csv":
        entries = _from_csv(path, column)
    else:
        raise LengthFileError(
            f"{path} has an unknown format. Give a folder, .json, .jsonl, .csv or .parquet."
        )
    if not isinstance(entries, list):
        raise LengthFileError(
            f"{path} holds no list. Give a list of lengths, or of objects with a length."
        )
    return [
        _value(entry, column, f"{path}, entry {number}")
        for number, entry in enumerate(entries)
    ]


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises LengthFileError if it is missing or not JSON."""
    return _parsed(_text(path), str(path))


def run_step(folder: Path, step: int | None = None) -> Mapping[str, Any]:
    """Return a run's record of a step (None is its last), empty without records. Raises as `read_lengths`."""
    path = folder / "lengths.jsonl"
    if not path.is_file():
        raise LengthFileError(
            f"{path} is not there. The run has recorded no lengths, so give a file of them instead."
        )
    steps = {
        record["step"]: record for _, record in json_records(path, has_step, check_lengths)
    }
    if step is not None and steps and step not in steps:
        raise LengthFileError(
            f"{path} has no step {step}. Its steps are {min(steps)} to {max(steps)}."
        )
    return steps[max(steps) if step is None else step] if steps else {}


def plan_record(plan: Plan) -> dict[str, Any]:
    """Return the data for `recorded_arguments`, for JSON: each sequence's `mini_batch` and `images`, and
    `plan`.
    """
    numbers = np.zeros(len(plan.lengths), np.int64)
    for number, mini_batch in enumerate(plan.mini_batches):
        numbers[mini_batch.rows] = number
    images = {"images": plan.images.given} if plan.images else {}
    return {"mini_batch": numbers.tolist(), "plan": asdict(plan.settings), **images}


def recorded_arguments(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `plan_batch` with which a run planned a step, or only prefixes if it recorded
    no plan.

    record: from `run_step`. Raises LengthFileError if its plan is damaged.
    """
    arguments: dict[str, Any] = {
        name: np.array(record[name], np.int64) for name in PREFIXES if name in record
    }
    if "plan" not in record:
        return arguments
    try:
        arguments |= {"images": record["images"]} if "images" in record else {}
        plan = record["plan"]
        numbers = whole_numbers(record["mini_batch"], "mini_batch", minimum=0)
        arguments |= {
            field.name: plan[field.name] for field in fields(Settings) if field.name in plan
        }
        arguments["cost_model"] = CostModel(**plan["cost_model"])
        if pipeline := plan.get("pipeline"):
            shares = pipeline["stage_shares"]
            arguments["pipeline"] = Pipeline(
                **pipeline | {"stage_shares": shares and tuple(shares)}
            )
        if degrees := plan.get("context_degrees"):
            arguments["context_degrees"] = ContextDegrees(**degrees)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise LengthFileError(
            f"the recorded plan of step {record['step']} is damaged. Give another --step."
        ) from None
    return arguments | {
        "mini_batches": [
            np.flatnonzero(numbers == number) for number in range(int(numbers.max()) + 1)
        ]
    }


def json_records(
    path: Path, *checks: Callable[[dict[str, Any]], object]
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    r"""Yield every line with its object. Skip, with a warning, lines that json.loads or `checks` refuse.

    Only \n ends a line: `str.splitlines` also splits inside texts, at U+2028 and others.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                for check in checks:
                    check(record)
            except Exception:  # damage can look like anything
                log.warning("%s:%d is not a record of a run. It is left out", path, number)
            else:
                yield line, record


def has_step(record: dict[str, Any]) -> None:
    if type(record["step"]) is not int or not 0 <= record["step"] <= LATEST_STEP:
        raise ValueError("its step is not a whole number")


def check_lengths(record: Mapping[str, Any]) -> None:
    columns = [
        whole_numbers(record[name], name, minimum=0)
        for name in record.keys() - {"step", "plan", "images"}
    ]
    whole_numbers(record["lengths"], "lengths", minimum=1)
    if len({len(column) for column in columns}) != 1:
        raise LengthFileError("its columns are not equally long")


def _from_csv(path: Path, column: str | None) -> list[Any]:
    rows = [
        row
        for row in csv.reader(io.StringIO(_text(path), newline=""), skipinitialspace=True)
        if row
    ]
    if (
        column is None
        and rows
        and len(rows[0]) == 1
        and rows[0][0].replace(".", "").isdecimal()
    ):
        return [row[0] for row in rows]
    return [dict(zip(rows[0], row, strict=False)) for row in rows[1:]]


def _from_parquet(path: Path, column: str | None) -> list[Any]:
    from pyarrow import ArrowInvalid, parquet  # slow to import

    try:
        name = _column(parquet.read_schema(path).names, column, str(path))
        return list(parquet.read_table(path, columns=[name])[name].to_pylist())
    except (ArrowInvalid, FileNotFoundError) as problem:
        raise LengthFileError(f"{path} cannot be read as Parquet: {problem}") from None


def _text(path: Path) -> str:
    if path.exists() and not path.is_file():  # a device such as /dev/zero has no end
        raise LengthFileError(f"{path} cannot be read: it is not a file.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise LengthFileError(f"{path} cannot be read: {problem.strerror}.") from None
    except UnicodeDecodeError:
        raise LengthFileError(f"{path} is not text in UTF-8") from None


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        raise LengthFileError(f"{place} is not JSON: {problem}") from None
    except ValueError:  # Python's own advice names one of its functions
        raise LengthFileError(
            f"{place} is not JSON: a number has more than 4,300 digits."
        ) from None
    except RecursionError:
        raise LengthFileError(f"{place} is not JSON: it is nested too deep.") from None


def _value(entry: Any, column: str | None, place: str) -> Any:
    return (
        entry[_column(list(entry), column, place)] if isinstance(entry, Mapping) else entry
    )


def _column(names: Sequence[str], column: str | None, place: str) -> str:
    wanted = COLUMNS if column is None else (column,)
    for name in wanted:
        if name in names:
            return name
    raise LengthFileError(
        f"{place} has no column {' or '.join(map(repr, wanted))}, only {', '.join(map(repr, names))}. "
        "Name one with --column."
    )


def _number(value: Any) -> float:
    if isinstance(value, bool) or value is None:
        raise ValueError(repr(value))
    return float(len(value)) if isinstance(value, list) else float(value)
