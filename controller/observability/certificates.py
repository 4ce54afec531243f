"""Read the certificate that `ballast certify` wrote beside a run's data: certificate.json.

data.train --its folder--> certificate.json --> Certificate: a line of a dry run, rows of a report
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.config.training import count_noun
from workers.errors import without_control

FILE = "certificate.json"
LEVELS = ("certain", "likely", "note")


@dataclass(frozen=True)
class Certificate:
    """findings: name, level, problem, place and advice of each. is_older: than a file of the data."""

    path: Path
    level: str
    findings: tuple[Mapping[str, str], ...]
    is_older: bool

    @property
    def line(self) -> str:
        """Summarise the findings, naming those that are certain."""
        names = [
            [row["name"] for row in self.findings if row["level"] == level]
            for level in LEVELS
        ]
        certain, likely, notes = names
        defects = f"{count_noun(len(certain), 'certain defect')}, {len(likely)} likely"
        named = (
            f": {', '.join(dict.fromkeys([*certain, *likely]))}"
            if certain or likely
            else ""
        )
        age = ". The data are newer: certify them again" if self.is_older else ""
        return without_control(
            f"{self.path} (level {self.level}): {defects}, {count_noun(len(notes), 'note')}{named}{age}"
        )


def certificate_file(paths: Iterable[str]) -> Path | None:
    """Return where the certificate of data sets lies: beside the first file, or in the first folder."""
    for path in paths:
        name, _, split = path.rpartition("@")
        for place in (path, name if split else ""):
            if place and Path(place).exists():
                return (Path(place) if Path(place).is_dir() else Path(place).parent) / FILE
    return None


def read_certificate(paths: Iterable[str]) -> Certificate | None:
    """Read the certificate of data sets. None if there is none, or one of other data or of no use."""
    paths = list(paths)
    file = certificate_file(paths)
    if file is None or not file.is_file():
        return None
    try:
        content: Any = json.loads(file.read_bytes())
        rows = [
            {name: str(value) for name, value in row.items()} for row in content["findings"]
        ]
        findings = tuple(
            row for row in rows if {"name", "level", "problem", "place"} <= row.keys()
        )
        if not set(paths) & set(content["data"]):
            return None
        written = file.stat().st_mtime
        newer = [
            path
            for path in paths
            if Path(path).exists() and Path(path).stat().st_mtime > written
        ]
        return Certificate(file, str(content["level"]), findings, bool(newer))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
