"""Tasks of installed packages, named where a file of records is:
`reasoning_gym:leg_counting?size=2000&seed=1`. Folders of Harbor's tasks, `harbor:FOLDER`, and servers of
OpenEnv, `openenv:URL` or `openenv:PACKAGE`, too.

    PACKAGE:NAME?key=value&key.sub=value --task_records--> a process imports the package --JSON--> records

Each record has a `prompt` of chat messages, and what its reward needs.
"""

import base64
from functools import cache, reduce
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qsl

import yaml

from workers.errors import ConfigError, DataError
from workers.user_code.process import NoAnswerError, ask

OPENENV = "openenv"  # a protocol of servers, and packages that have one
PACKAGES = {  # imported by each, whose name is an extra's too
    "reasoning_gym": "reasoning_gym",
    "verifiers": "verifiers",
    OPENENV: "websockets",
}
HARBOR = "harbor"  # a format of folders, read without a package
MODULES = {
    "verifiers": "agents.verifiers_agent",
    HARBOR: "harbor.task_folders",
    OPENENV: "openenv.tasks",
}
CODE = ("verifiers", OPENENV)
"""Sources whose names are code that runs here: a module that is imported, a package that is installed."""
HARBOR_CLASS = "workers.harbor.environment:HarborEnvironment"
LOADING_SECONDS = 600.0  # a package may download its data
TASK = "task"  # column with what an environment of a package takes


def package_of(text: str) -> str:
    """Return the package that a setting's value names, or "" if it names a file or a class."""
    package = text.partition(":")[0]
    return package if package in (*PACKAGES, HARBOR) and text != package else ""


def check_installed(key: str, text: str) -> None:
    """Raise ConfigError if the package that a setting names is missing."""
    extra = package_of(text)
    package = PACKAGES.get(extra, "")
    if package and find_spec(package) is None:
        raise ConfigError(
            f"{key}={text}: the package {package} is not installed. Install it: "
            f'`pip install "ballast-rl[{extra}]"`.'
        )


@cache
def task_records(text: str) -> tuple[dict[str, Any], ...]:
    """Return the records of a source. Raises DataError."""
    module = MODULES.get(package_of(text), "user_code.task_sources")
    try:
        return tuple(
            ask(f"workers.{module}:records", text, timeout_s=LOADING_SECONDS, setting="")
        )
    except (NoAnswerError, ConfigError) as error:
        raise DataError(f"{text}: {str(error).rstrip('.')}.") from None


def find_verifiers_agent(key: str, text: str, timeout_s: float) -> bytes:
    """Return the agent of an environment of verifiers, pickled. Raises ConfigError."""
    try:
        packed = ask(
            "workers.agents.verifiers_agent:pack_agent",
            text,
            timeout_s=timeout_s,
            setting="",
        )
    except (NoAnswerError, ConfigError) as error:
        raise ConfigError(f"{key}={text}: {str(error).rstrip('.')}.") from None
    return base64.b64decode(packed)


# The functions below run in the process.


def name_and_options(text: str) -> tuple[str, dict[str, Any]]:
    """Parse the name of a source. Values are read as YAML. Raises ValueError for a query that is none."""
    name, _, query = text.partition(":")[2].partition("?")
    options: dict[str, Any] = {}
    for key, value in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
        *sections, last = key.split(".")
        place: dict[str, Any] = reduce(
            lambda inner, section: inner.setdefault(section, {}), sections, options
        )
        # It is the name of a harness.
        place[last] = value if value == "null" else yaml.safe_load(value)
    return name, options


def records(text: str) -> list[dict[str, Any]]:
    """Return tasks of Reasoning Gym."""
    from reasoning_gym.factory import create_dataset

    name, options = name_and_options(text)
    options = {"seed": 0} | options
    tasks = list(create_dataset(name, **options))
    for task in tasks:
        task["prompt"] = [{"role": "user", "content": task["question"]}]
        task["metadata"]["options"] = options  # the score depends on some
    return tasks
