"""Read lines of JSON, and values of them with their types. Every error names file and line."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workers.errors import DataError, clause, quote, why_not_json

LARGEST_RECORD = 2**28
"""Bytes. A sample of a million tokens with four columns has 40 MB."""


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the object of each line. Raises DataError."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(LARGEST_RECORD + 1):
                number += 1
                if line.strip():
                    yield f"{path}:{number}", parse_record(f"{path}:{number}", line)
    except OSError as error:
        raise DataError(f"{path}: it cannot be read: {clause(error)}.") from None


def read_record(path: Path) -> dict[str, Any]:
    """Return the object of a file with one. Raises DataError."""
    try:
        with path.open("rb") as file:
            return parse_record(str(path), file.read(LARGEST_RECORD + 1))
    except OSError as error:
        raise DataError(f"{path}: it cannot be read: {clause(error)}.") from None


def parse_record(place: str, text: bytes) -> dict[str, Any]:
    if len(text) > LARGEST_RECORD:
        raise DataError(
            f"{place}: longer than {LARGEST_RECORD >> 20} MiB. Write a sample a line."
        )
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place}: it is not JSON: {why_not_json(error)}. Write the dump again."
        ) from None
    if not isinstance(record, dict):
        raise DataError(
            f"{place}: it is {quote(record)}, not a mapping. Write a sample a line."
        )
    return record


class Record:
    """Values of a mapping by name. Raises DataError for one of another type."""

    def __init__(self, place: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise DataError(
                f"{place}: it is {quote(values)}, not a mapping. Write the dump again."
            )
        self.place = place
        self.values = values

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def items(self, name: str) -> list[Any]:
        """Return a list, or an empty one if there is none."""
        value = self.values.get(name)
        if value is None:
            return []
        if hasattr(value, "tolist"):  # a tensor or an array
            value = value.tolist()
        if not isinstance(value, list | tuple):
            raise self.error(name, "not a list")
        return list(value)

    def numbers(self, name: str, length: int | None = None) -> list[Any]:
        """Return a list of numbers, of the given length."""
        numbers = self.items(name)
        if not all(isinstance(number, int | float) for number in numbers):
            raise self.error(name, "not a list of numbers")
        if length is not None and len(numbers) != length:
            raise self.error(name, f"a list of {len(numbers)} values, not of {length}")
        return numbers

    def whole_numbers(self, name: str, length: int | None = None) -> list[int]:
        numbers = self.numbers(name, length)
        if not all(math.isfinite(number) and number == int(number) for number in numbers):
            raise self.error(name, "not a list of whole numbers")
        return [int(number) for number in numbers]

    def number(self, name: str) -> float:
        value: Any = self.values.get(name)
        if hasattr(value, "item"):  # a tensor
            value = value.item()
        if not isinstance(value, int | float):
            raise self.error(name, "not a number")
        return float(value)

    def whole(self, name: str) -> int:
        number = self.number(name)
        if not math.isfinite(number) or number != int(number):
            raise self.error(name, "not a whole number")
        return int(number)

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self.error(name, "not a text")
        return value

    def record(self, name: str) -> "Record":
        return Record(f"{self.place}: {name}", self.values.get(name) or {})

    def records(self, name: str) -> list["Record"]:
        items = self.items(name)
        return [
            Record(f"{self.place}: {name}[{number}]", item)
            for number, item in enumerate(items)
        ]

    def error(self, name: str, problem: str) -> DataError:
        return DataError(
            f"{self.place}: {name} is {problem}. Name a dump that the system itself wrote."
        )
