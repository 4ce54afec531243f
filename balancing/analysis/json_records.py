"""Reads JSON lines that a run has recorded. A line that a crash, a disk or an editor has damaged costs itself alone."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
LATEST_STEP = 2**53  # beyond, a chart's numbers are not exact


def json_records(path: Path, *checks: Callable[[dict[str, Any]], object]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every line with its object. A line on which json.loads or one of `checks` raises is left out, with a warning.

    Lines end at \\n alone: `str.splitlines` also splits inside texts, at U+2028 and others.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                for check in checks:
                    check(record)
            except Exception:  # damage can look like anything
                log.warning("%s:%d is not a record of a run; it is left out", path, number)
            else:
                yield line, record


def has_step(record: dict[str, Any]) -> None:
    """Raise unless the record is an object with a step."""
    if type(record["step"]) is not int or not 0 <= record["step"] <= LATEST_STEP:
        raise ValueError("its step is not a whole number")
