"""Files with a JSON object a line."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
