"""A user's functions, such as the reward: found by name and checked before anything starts.

"module:function" or "path/file.py:function" --load_function--> callable --requested_columns--> names it is given
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workers.errors import ConfigError


def load_function(key: str, name: str) -> Callable[..., Any]:
    """The function that `module:function` or `path/file.py:function`, the value of setting `key`, names.

    Raises ConfigError naming what is missing.
    """
    place, separator, function_name = name.rpartition(":")
    if not separator:
        raise ConfigError(f"{key}={name!r} must be module:function or path/file.py:function.")
    module = _load_file(key, Path(place)) if place.endswith(".py") else _load_module(key, place)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{key}={name!r}: {place} has no function {function_name!r}.")
    return function


def _load_file(key: str, path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path}.")
    module_name = f"ballast_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{key}: {path} cannot be imported: {type(error).__name__}: {error}.") from error
    return module


def _load_module(key: str, name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(f"{key}: module {name!r} cannot be imported: {type(error).__name__}: {error}.") from error


def requested_columns(function: Callable[..., Any], record: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Which of the record's columns the function takes by name, beside `response`.

    Raises ConfigError if it has no `response` parameter or requires a column that the data does not have.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if "response" not in names and not takes_all:
        raise ConfigError(f"reward.function={name!r} must take a parameter 'response'.")
    offered = set(record)
    required = {p.name for p in parameters if p.name in names and p.default is p.empty}
    lacking = sorted(required - offered - {"response"})
    if lacking:
        raise ConfigError(f"reward.function={name!r} asks for {lacking}, but the data has {sorted(offered)}.")
    return tuple(sorted((offered if takes_all else names & offered) - {"response"}))
