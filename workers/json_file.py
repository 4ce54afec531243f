"""Read JSON files that users give."""

import json
from pathlib import Path
from typing import Any

from workers.errors import ConfigError, why_not_json


def read_json(path: Path, key: str) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError, naming setting `key`, if the file does not hold one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{key}: {path} cannot be read: {error.strerror or error}."
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # numbers of 5,000 digits are ValueErrors, too
        raise ConfigError(
            f"{key}: {path} is not valid JSON: {why_not_json(error)}."
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{key}: {path} is not a JSON object.")
    return content
