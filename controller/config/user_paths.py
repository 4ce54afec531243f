"""Replace `~/` and `$NAME/` at the start of values: no shell does so behind `=` or in a file."""

import os
import re
from typing import Any

from workers.errors import ConfigError

_START = re.compile(r"(~\w*|\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\})(?=/)")


def with_user_paths(value: Any, key: str) -> Any:
    """Return a setting's value with its text, or a mapping's keys and texts, expanded. Lists hold no paths:
    stop texts.

    Raises ConfigError, naming the setting `key`, for a variable that is not set and a user that does not
    exist.
    """
    if isinstance(value, dict):
        return {
            with_user_paths(name, key): with_user_paths(item, key)
            for name, item in value.items()
        }
    start = _START.match(value) if isinstance(value, str) else None
    if start is None:
        return value
    expanded = os.path.expanduser(os.path.expandvars(start[0]))
    if expanded == start[0]:
        kind = (
            "there is no such user"
            if start[0].startswith("~")
            else "the environment has no such variable"
        )
        raise ConfigError(f"{key}={value}: {kind} as {start[0]}. Write the path itself.")
    return expanded + value[start.end() :]
