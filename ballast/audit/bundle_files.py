"""Write and read the two files of a bundle.

    Bundle --write_bundle--> step.json, tokens.safetensors --read_bundle--> Bundle, with mapped columns

Nothing is read by pickle. Sizes, types and names are checked before a column is touched.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ballast.audit.bundle import (
    FACTS_FILE,
    FORMAT,
    METRICS,
    MOST_TOKENS,
    NAME,
    NUMPY_TYPES,
    OFFSETS,
    ROW_COLUMNS,
    TOKEN_COLUMNS,
    TOKENS_FILE,
    VERSION,
    Algorithm,
    Bundle,
    Facts,
    Named,
    check_columns,
    check_offsets,
)
from workers.errors import DataError, OutputError, clause, quote, why_not_json

LARGEST_FACTS = 2**24
"""Bytes of step.json. A step's facts have a few hundred."""
LARGEST_HEADER = 2**20
LONGEST_TEXT = 1_000


def bundles_of(folder: Path) -> list[Path]:
    """Return the bundles in a folder by step, or the folder itself if it is one. step.json stands for it."""
    if folder.name == FACTS_FILE and folder.is_file():
        return [folder.parent]
    if (folder / FACTS_FILE).is_file():
        return [folder]
    paths = [file.parent for file in folder.glob(f"*/{FACTS_FILE}") if file.is_file()]
    return sorted(paths, key=lambda path: (_number_of(path), path.name))


def _number_of(path: Path) -> int:
    digits = re.findall(r"\d{1,18}", path.name)
    return int(digits[-1]) if digits else 0


def write_bundle(folder: str | Path, bundle: Bundle) -> Path:
    """Write a bundle. Raises OutputError, and DataError if its columns do not fit together."""
    folder = Path(folder)
    check_columns(str(folder), bundle)
    arrays = {OFFSETS: np.asarray(bundle.offsets, np.int64)}
    types = TOKEN_COLUMNS | ROW_COLUMNS
    for name, column in (*bundle.tokens.items(), *bundle.rows.items()):
        column_type = types.get(name, column.dtype)
        arrays[name] = np.ascontiguousarray(column, column_type)
    text = json.dumps(_facts_record(bundle), indent=1, allow_nan=False)
    facts_file = folder / FACTS_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A folder without step.json is not a bundle, so that a reader never meets half of one.
        facts_file.unlink(missing_ok=True)
        save_file(arrays, folder / TOKENS_FILE)
        unfinished = folder / f"{FACTS_FILE}.part"
        unfinished.write_text(text)
        unfinished.replace(facts_file)
    except (OSError, SafetensorError) as error:
        reason = clause(error)
        raise OutputError(
            f"{folder}: could not be written: {reason}. Name another folder."
        ) from None
    return folder


def _facts_record(bundle: Bundle) -> dict[str, Any]:
    facts = bundle.facts
    settings = {}
    for setting in fields(Algorithm):
        value = getattr(facts.algorithm, setting.name)
        if value is not None:
            settings[setting.name] = value
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": facts.step,
        "rows": bundle.row_count,
        "tokens": bundle.token_count,
        "algorithm": settings,
        "loss": _finite(facts.loss),
        "gradient_norm": _finite(facts.gradient_norm),
        "metrics": {name: _finite(values) for name, values in facts.metrics.items()},
        "denominators": {
            "tokens": list(facts.token_denominators),
            "sequences": list(facts.sequence_denominators),
        },
        "model": {"name": facts.model.name, "hash": facts.model.hash},
        "template": {"name": facts.template.name, "hash": facts.template.hash},
        "weight_version": facts.weight_version,
        "learning_rate": facts.learning_rate,
        "sampled": facts.sampled,
        "dropped": dict(facts.dropped),
        "end_tokens": list(facts.end_tokens),
        "precision": facts.precision,
        "writer": facts.writer,
        "missing": bundle.missing,
    }


def _finite(numbers: tuple[float, ...]) -> list[float | None]:
    """Null stands for NaN and infinity, which JSON lacks."""
    return [number if math.isfinite(number) else None for number in numbers]


def read_bundle(folder: str | Path) -> Bundle:
    """Read a bundle, with columns mapped from the file. Raises DataError if it is broken or of another
    version.
    """
    folder = Path(folder)
    facts, counts = _read_facts(folder / FACTS_FILE)
    arrays = _map_columns(folder / TOKENS_FILE)
    place = f"{folder / TOKENS_FILE}"
    if OFFSETS not in arrays:
        raise DataError(
            f"{place}: it has no {OFFSETS}. Write rows + 1 numbers, from 0 to the tokens."
        )
    offsets = arrays.pop(OFFSETS).astype(np.int64)
    check_offsets(place, offsets)
    tokens, rows = _sort_columns(place, arrays, offsets)
    bundle = Bundle(facts, offsets, tokens, rows, str(folder))
    check_columns(place, bundle)
    for name, count in (("rows", bundle.row_count), ("tokens", bundle.token_count)):
        if counts.get(name, count) != count:
            raise DataError(
                f"{folder / FACTS_FILE}: {name}={counts[name]}, but {TOKENS_FILE} has {count}. "
                "The two files are of different steps. Write both again."
            )
    return bundle


def read_step_number(folder: Path) -> int:
    """Return a bundle's step without its columns. Raises DataError."""
    return _read_facts(folder / FACTS_FILE)[0].step


def _read_facts(path: Path) -> tuple[Facts, dict[str, Any]]:
    record = _read_json(path)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise DataError(
            f'{path}: it does not say "format": "{FORMAT}". Name a bundle, see docs/audit.md.'
        )
    version = record.get("version")
    if version != VERSION or isinstance(version, bool):
        raise DataError(
            f"{path}: version={quote(version)}: this Ballast reads version {VERSION}. "
            "Write it again, or audit it with the Ballast that wrote it."
        )
    reader = _FactsReader(path, record)
    counts = {
        name: reader.whole(record, name) for name in ("rows", "tokens") if name in record
    }
    return reader.facts(), counts


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file. Name the folder of a bundle.")
    try:
        if path.stat().st_size > LARGEST_FACTS:
            raise DataError(
                f"{path}: larger than {LARGEST_FACTS >> 20} MiB. Put columns into {TOKENS_FILE}."
            )
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: it is not JSON: {why_not_json(error)}. Write it again."
        ) from None
    except OSError as error:
        raise DataError(f"{path}: it cannot be read: {clause(error)}.") from None


class _FactsReader:
    """Reads values of step.json with their types. Raises DataError."""

    def __init__(self, path: Path, record: Mapping[str, Any]) -> None:
        self.path = path
        self.record = record

    def facts(self) -> Facts:
        record = self.record
        denominators = self.mapping(record, "denominators")
        end_tokens = self.numbers(record, "end_tokens")
        missing = self.mapping(record, "missing")
        dropped = self.mapping(record, "dropped")
        metrics = self.mapping(record, "metrics")
        return Facts(
            step=self.whole(record, "step"),
            algorithm=self.algorithm(),
            loss=self.numbers(record, "loss"),
            gradient_norm=self.numbers(record, "gradient_norm"),
            token_denominators=self.numbers(denominators, "tokens"),
            sequence_denominators=self.numbers(denominators, "sequences"),
            model=self.named("model"),
            template=self.named("template"),
            weight_version=self.optional(record, "weight_version", self.whole),
            learning_rate=self.optional(record, "learning_rate", self.number),
            sampled=self.optional(record, "sampled", self.whole),
            dropped={reason: self.whole(dropped, reason) for reason in dropped},
            end_tokens=tuple(int(number) for number in end_tokens if math.isfinite(number)),
            precision=self.text(record, "precision"),
            writer=self.text(record, "writer"),
            metrics={
                name: self.numbers(metrics, name) for name in METRICS if name in metrics
            },
            missing={self.check_name(name): self.text(missing, name) for name in missing},
        )

    def algorithm(self) -> Algorithm:
        record = self.mapping(self.record, "algorithm")
        settings: dict[str, Any] = {}
        for setting in fields(Algorithm):
            name = setting.name
            if record.get(name) is None:
                continue
            kind = str(setting.type)
            if kind.startswith("str"):
                settings[name] = self.text(record, name)
            elif kind.startswith("int"):
                settings[name] = self.whole(record, name)
            else:
                settings[name] = self.number(record, name)
        unknown = sorted(set(record) - {setting.name for setting in fields(Algorithm)})
        if unknown:
            raise self.error(
                f"algorithm.{unknown[0]}", "is not a setting of the format", "Leave it out"
            )
        return Algorithm(**settings)

    def named(self, name: str) -> Named:
        record = self.mapping(self.record, name)
        return Named(self.text(record, "name"), self.text(record, "hash"))

    def mapping(self, record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        value = record.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(name, f"is {quote(value)}, not a mapping", "Write {...}")
        return value

    def text(self, record: Mapping[str, Any], name: str) -> str:
        value = record.get(name)
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            raise self.error(
                name,
                f"is {quote(value)}, not a text",
                f"Write at most {LONGEST_TEXT} characters",
            )
        return value

    def optional(
        self,
        record: Mapping[str, Any],
        name: str,
        read: Callable[[Mapping[str, Any], str], Any],
    ) -> Any:
        return None if record.get(name) is None else read(record, name)

    def whole(self, record: Mapping[str, Any], name: str) -> int:
        number = self.number(record, name)
        if not math.isfinite(number) or number != int(number) or abs(number) > 2**53:
            raise self.error(name, f"is {number}, not a whole number", "Write one")
        return int(number)

    def number(self, record: Mapping[str, Any], name: str) -> float:
        value = record.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"is {quote(value)}, not a number", "Write one")
        try:
            return float(value)
        except OverflowError:
            raise self.error(name, "is too large", "Write a number below 1e308") from None

    def numbers(self, record: Mapping[str, Any], name: str) -> tuple[float, ...]:
        """Read a number or a list of numbers, of which null is NaN."""
        value = record.get(name)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        return tuple(
            math.nan if item is None else self.number({name: item}, name) for item in values
        )

    def check_name(self, name: str) -> str:
        if not re.fullmatch(r"[a-z][a-z0-9_.]{0,63}", name):
            raise self.error(
                "missing", f"names {quote(name)}", "Name columns and facts of the format"
            )
        return name

    def error(self, name: str, problem: str, advice: str) -> DataError:
        return DataError(f"{self.path}: {name} {problem}. {advice}.")


def _map_columns(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file, mapped into memory. Raises DataError."""
    if not path.is_file():
        raise DataError(
            f"{path}: there is no such file. A bundle has it next to {FACTS_FILE}."
        )
    try:
        header_size = _header_size(path)
        with safe_open(path, framework="numpy"):
            pass  # checks that sizes and places in the header fit the file
        with path.open("rb") as file:
            file.seek(8)
            header = json.loads(file.read(header_size))
        header.pop("__metadata__", None)
        return {
            name: _map_column(path, name, entry, 8 + header_size)
            for name, entry in header.items()
        }
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: it is not a whole safetensors file: {clause(error)}. Write it again."
        ) from None


def _header_size(path: Path) -> int:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > LARGEST_HEADER:
        raise DataError(
            f"{path}: its header has {size} bytes, above {LARGEST_HEADER}. Write it again."
        )
    return size


def _map_column(
    path: Path, name: str, entry: Mapping[str, Any], data_start: int
) -> np.ndarray:
    column_type = entry["dtype"]
    shape = entry["shape"]
    if not NAME.fullmatch(name):
        raise DataError(
            f"{path}: a column is named {quote(name)}. Use a-z, 0-9 and _, at most 64."
        )
    if column_type not in NUMPY_TYPES:
        known = ", ".join(NUMPY_TYPES)
        raise DataError(
            f"{path}: {name} has the type {quote(column_type)}. Write one of {known}."
        )
    if len(shape) != 1:
        raise DataError(
            f"{path}: {name} has the shape {quote(shape)}. Write columns of one dimension."
        )
    if shape[0] > MOST_TOKENS:
        raise DataError(
            f"{path}: {name} has {shape[0]} values, above {MOST_TOKENS}. Split the step."
        )
    if not shape[0]:
        return np.empty(0, NUMPY_TYPES[column_type])
    start = data_start + entry["data_offsets"][0]
    return np.memmap(path, NUMPY_TYPES[column_type], "r", start, (shape[0],))


def _sort_columns(
    place: str, arrays: Mapping[str, np.ndarray], offsets: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return token columns and row columns. Unknown ones are sorted by their size."""
    tokens = {}
    rows = {}
    for name, column in arrays.items():
        is_token_column = name in TOKEN_COLUMNS or (
            name not in ROW_COLUMNS and len(column) == offsets[-1]
        )
        if is_token_column:
            tokens[name] = column
        else:
            rows[name] = column
    return tokens, rows
