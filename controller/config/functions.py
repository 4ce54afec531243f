"""A user's functions, such as the reward, and environment: found by name and checked before anything starts.

"module:function" or "path/file.py:function" --load_function--> callable --requested_columns--> names it is given
reward functions --pack--> bytes that their processes unpack, tried once by check_rewards
"module:Class" --pack_environment--> bytes likewise, tried once by check_environment
"""

import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import cloudpickle

from workers.environment_process import EnvironmentPool
from workers.errors import ConfigError, EpisodeError
from workers.reward_process import Call, RewardFunction, RewardProcess

RESPONSES = {"response", "responses"}


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
    """Which of the record's columns the function takes by name, beside `response` or, for all at once, `responses`.

    Raises ConfigError if it has neither parameter or requires a column that the data does not have.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if len(names & RESPONSES) != 1 and not takes_all:
        raise ConfigError(
            f"reward.function={name!r} must take a parameter 'response', or 'responses' for many at once."
        )
    offered = set(record)
    required = {p.name for p in parameters if p.name in names and p.default is p.empty}
    lacking = sorted(required - offered - RESPONSES)
    if lacking:
        raise ConfigError(f"reward.function={name!r} asks for {lacking}, but the data has {sorted(offered)}.")
    return tuple(sorted((offered if takes_all else names & offered) - RESPONSES))


def pack(functions: Sequence[RewardFunction]) -> bytes:
    """The functions pickled by value, so that other nodes and processes need no copy of their files."""
    for function in functions:
        _pickle_by_value(function.function)
    return cast(bytes, cloudpickle.dumps(list(functions)))


def pack_environment(name: str) -> bytes:
    """The class that rollout.environment names, pickled by value. Raises ConfigError if it lacks `reset` or `step`."""
    environment = load_function("rollout.environment", name)
    methods = [method for method in ("reset", "step") if not callable(getattr(environment, method, None))]
    if not isinstance(environment, type) or methods:
        raise ConfigError(f"rollout.environment={name!r} must be a class with the methods reset and step.")
    _pickle_by_value(environment)
    return cast(bytes, cloudpickle.dumps(environment))


def _pickle_by_value(found: Any) -> None:
    module = sys.modules[found.__module__]
    if "site-packages" not in (getattr(module, "__file__", None) or "site-packages"):
        cloudpickle.register_pickle_by_value(module)


def check_environment(environment: bytes, example: dict[str, Any], *, timeout_s: float) -> None:
    """Play one turn, an empty response to one record, in a process of its own.

    Raises ConfigError with what went wrong: an environment must answer any text.
    """

    async def one_turn() -> None:
        pool = EnvironmentPool(environment, timeout_s)
        try:
            async with pool.episode() as played:
                await played.reset(example)
                await played.step("")
        finally:
            await pool.stop()

    try:
        asyncio.run(one_turn())
    except EpisodeError as error:
        raise ConfigError(f"rollout.environment failed on the first record and an empty response: {error}.") from None


def check_rewards(functions: bytes, example: Mapping[str, Any], *, timeout_s: float) -> None:
    """Score an empty response to one record in a process of its own.

    Raises ConfigError with what went wrong: a function must score any text.
    """
    process = RewardProcess(functions, timeout_s=timeout_s, concurrency=1)
    try:
        score = process.run([Call(0, "", example)])[0]
    finally:
        process.stop()
    if score.failure:
        raise ConfigError(f"reward.function failed on the first record and an empty response: {score.failure}.")
