"""Map settings of other systems to ours, by the table `counterparts.yaml`, which documents its rows.

trainer.total_epochs --answer--> "here it is run.steps (...)"
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

PREVIOUS = "Ballast 0.2"
TABLE = Path(__file__).with_name("counterparts.yaml")


@dataclass(frozen=True)
class Counterpart:
    """One key of another system.

    here: our settings, or a section, or empty. values: our settings by their value. default: their default,
    if leaving the key out means something else here.
    """

    system: str
    key: str
    here: tuple[str, ...] = ()
    note: str = ""
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    default: str = ""

    def is_of(self, names: Collection[str]) -> bool:
        """Whether the settings `names` include the counterpart."""
        return all(name in names or _has_section(names, name) for name in self.here)

    @property
    def answer(self) -> str:
        if not self.here:
            return f"it has no counterpart here ({self.note})"
        return (
            f"here it is {' and '.join(self.here)}{f' ({self.note})' if self.note else ''}"
        )


def _has_section(names: Collection[str], section: str) -> bool:
    return any(name.startswith(f"{section}.") for name in names)


@cache
def counterparts() -> tuple[Counterpart, ...]:
    table = yaml.BaseLoader(
        TABLE.read_text(encoding="utf-8")
    ).get_single_data()  # every scalar is a text
    return tuple(
        _row(system, key, row)
        for system, rows in table.items()
        for key, row in rows.items()
    )


def _row(system: str, key: str, row: str | Mapping[str, Any]) -> Counterpart:
    fields: dict[str, Any] = {"here": row} if isinstance(row, str) else dict(row)
    here = tuple(fields.pop("here", "").split())
    values = fields.pop("values", {})
    values = {
        theirs: {here[0]: ours} if isinstance(ours, str) else ours
        for theirs, ours in values.items()
    }
    return Counterpart(system, key, here, values=values, **fields)


def previous_name(key: str, names: Collection[str]) -> Counterpart | None:
    """Return the counterpart of a setting of Ballast's previous version."""
    rows = (
        row for row in counterparts() if row.system.startswith(PREVIOUS) and row.key == key
    )
    return next((row for row in rows if row.is_of(names)), None)


@cache
def _rows_of(names: frozenset[str]) -> list[tuple[str, Counterpart]]:
    """Return the table's rows for a command's settings, with their keys as settings are written."""
    return [(row.key.replace("-", "_"), row) for row in counterparts() if row.is_of(names)]


def answer(key: str, names: Collection[str], *, exact: bool = False) -> str:
    """Describe the counterpart of another system's key, or return "" if the settings `names` include none.

    Matches the whole key. Unless `exact`, then an end of `key` with its section, keys that end with `key`,
    and patterns. Several counterparts are all named.
    """
    key = key.replace("-", "_")
    rows = _rows_of(frozenset(names))
    matches = [row for theirs, row in rows if key == theirs]
    if not exact:
        matches = matches or [
            row for theirs, row in rows if "." in theirs and key.endswith(f".{theirs}")
        ]
        matches = matches or [row for theirs, row in rows if theirs.endswith(f".{key}")]
    # `model.*` of another system does not answer a misspelt setting of our section `model`.
    ours = () if exact else tuple({f"{name.partition('.')[0]}.*" for name in names})
    matches = matches or [
        row for theirs, row in rows if theirs not in ours and fnmatchcase(key, theirs)
    ]
    matches = [row for row in matches if row.here] or matches
    return ", or ".join({row.here: row.answer for row in reversed(matches)}.values())
