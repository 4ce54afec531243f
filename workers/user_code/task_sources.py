"""Tasks of installed packages, named where a file of records is: `reasoning_gym:leg_counting?size=2000&seed=1`.

    PACKAGE:NAME?key=value&key.sub=value --task_records--> another process imports the package --JSON--> records

Each record has a `prompt` of chat messages, and what its reward needs.
"""

import sys
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import yaml

from workers.errors import ConfigError, DataError, named
from workers.user_code.process import NoAnswerError, ask

EXTRAS = {"reasoning_gym": "reasoning_gym", "verifiers": "verifiers"}
LOADING_SECONDS = 600.0  # a package may download its data


@dataclass(frozen=True)
class TaskSource:
    """package: also its module. options: nested, values as YAML reads them."""

    package: str
    name: str
    options: dict[str, Any]


def package_of(text: str) -> str:
    """Return the package that a setting's value names, or "" if it names a file or a class."""
    package, separator, name = text.partition(":")
    return package if separator and name and package in EXTRAS else ""


def check_installed(key: str, text: str) -> None:
    """Raise ConfigError if the package that a setting names is missing."""
    package = package_of(text)
    if package and find_spec(package) is None:
        raise ConfigError(
            f'{key}={text}: the package {package} is not installed. `pip install "ballast-rl[{EXTRAS[package]}]"` does '
            "it."
        )


@cache
def task_records(text: str) -> tuple[dict[str, Any], ...]:
    """Return the records of a source. Raises DataError."""
    try:
        return tuple(ask("workers.user_code.task_sources:load", text, timeout_s=LOADING_SECONDS, setting=""))
    except (NoAnswerError, ConfigError) as error:
        raise DataError(f"{text}: {str(error).rstrip('.')}.") from None


def task_source(text: str) -> TaskSource:
    """Parse the name of a source. Raises ConfigError."""
    name, _, query = text.partition(":")[2].partition("?")
    options: dict[str, Any] = {}
    try:
        for key, value in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
            *sections, last = key.split(".")
            place = options
            for section in sections:
                place = place.setdefault(section, {})
            read = yaml.safe_load(value)
            place[last] = value if read is None else read  # `null` is the name of a harness
    except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ConfigError(f"options must have the form ?key=value&key.sub=value ({named(error)}).") from None
    return TaskSource(package_of(text), name, options)


# The functions below run in the process.


def load(text: str) -> list[dict[str, Any]]:
    source = task_source(text)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return _of_reasoning_gym(source)


def _of_reasoning_gym(source: TaskSource) -> list[dict[str, Any]]:
    from reasoning_gym.factory import DATASETS, create_dataset

    if source.name not in DATASETS:
        near = get_close_matches(source.name, DATASETS, 3, 0.4)
        raise ConfigError(f"reasoning-gym has no such data set. Similar are {', '.join(near) or 'none'}.")
    options = {"seed": 0, **source.options}
    try:
        tasks = list(create_dataset(source.name, **options))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"the data set refuses these options: {named(error)}.") from None
    return [
        {
            "prompt": [{"role": "user", "content": task["question"]}],
            **task,
            "metadata": task["metadata"] | {"options": options},
        }
        for task in tasks
    ]
