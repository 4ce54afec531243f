"""Collect the rows of a dump, and name the columns that only some of them have."""

from collections.abc import Hashable, Mapping
from typing import Any

from ballast.audit.bundle import Bundle
from ballast.audit.recording import make_bundle
from workers.errors import DataError


class Rows:
    """Rows of a step. path: of the dump, for messages."""

    def __init__(self, path: Any) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.numbers: dict[str, dict[Hashable, int]] = {}

    def add(self, **values: Any) -> None:
        """Add a row. None: the dump lacks the value."""
        self.rows.append(
            {name: value for name, value in values.items() if value is not None}
        )

    def number(self, column: str, key: Hashable) -> int:
        """Return the number of a group or of a sample that the dump names by `key`."""
        numbers = self.numbers.setdefault(column, {})
        return numbers.setdefault(key, len(numbers))

    def bundle(self, writer: str, missing: Mapping[str, str], **facts: Any) -> Bundle:
        """Return the bundle. missing: why, by the name of a column that the format lacks."""
        if not self.rows:
            raise DataError(f"{self.path}: it has no samples. Name a dump of a step.")
        reasons = dict(missing)
        columns: dict[str, Any] = {}
        names = dict.fromkeys(name for row in self.rows for name in row)
        for name in names:
            values = [row[name] for row in self.rows if name in row]
            if len(values) == len(self.rows):
                columns[name] = values
                reasons.pop(name, None)
            else:
                reasons[name] = f"{len(values)} of {len(self.rows)} samples have it"
        try:
            return make_bundle(writer=writer, missing=reasons, **columns, **facts)
        except DataError as error:
            raise DataError(f"{self.path}: {error}") from None
