"""Files of JSON, a value a line."""

import json
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]
