"""Functions passed to a call as Python objects instead of names.

    ballast.fit(..., reward=f) --give_rewards--> reward.function: callable:f, and {"callable:f": f, pickled}
    ballast.fit(..., step=f) --give_step--> run.step: callable:f, and f runs in this process

A run records only these names. Resuming it needs the same functions again.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any, cast

from controller.config.file import LARGEST_FLOAT
from controller.config.functions import GIVEN
from controller.config.sections import RewardConfig, RunConfig
from controller.config.yaml_text import show_value
from workers.errors import ConfigError, describe_error
from workers.user_code.functions import UserFunction, pickle_function, signature_of

RewardFunctionLike = Callable[..., Any] | str
Reward = (
    RewardFunctionLike | Sequence[RewardFunctionLike] | Mapping[RewardFunctionLike, float]
)
"""A function, or its name as in the settings. Several are summed, each with its weight or with 1."""

GivenFunctions = Mapping[str, UserFunction]  # by their names in the settings
NONE_GIVEN: GivenFunctions = {}


def give_rewards(settings: RewardConfig, reward: Reward | None) -> GivenFunctions:
    """Replace the reward settings with names for `reward`, unless it is None. Returns its functions.

    Raises ConfigError for functions that cannot be pickled or share a name.
    """
    if reward is None:
        return NONE_GIVEN
    several = isinstance(reward, (Mapping, list, tuple))
    functions: list[Any] = list(cast(Iterable[Any], reward)) if several else [reward]
    weights = (
        list(reward.values()) if isinstance(reward, Mapping) else [1.0] * len(functions)
    )
    numbers = all(
        isinstance(weight, (int, float)) and abs(weight) <= LARGEST_FLOAT
        for weight in weights
    )
    if not numbers or not all(callable(f) or isinstance(f, str) for f in functions):
        raise ConfigError(
            f"reward={show_value(reward)}: expected a function, a list, or a mapping of functions to weights."
        )
    by_name: dict[str, RewardFunctionLike] = {}
    for function in functions:
        if name_of(function) in by_name:
            raise ConfigError(
                f"reward: two functions are named {name_of(function)}. Rename one of them."
            )
        by_name[name_of(function)] = function
    settings.function = "" if several else name_of(functions[0])
    settings.functions = (
        dict(zip(by_name, map(float, weights), strict=True)) if several else {}
    )
    return {
        name: pickle_reward(name, function)
        for name, function in by_name.items()
        if not isinstance(function, str)
    }


def give_step(settings: RunConfig, step: Any) -> GivenFunctions:
    """Set run.step to a name for `step`, unless it is None. Returns its signature.

    Raises ConfigError unless `step` is a function.
    """
    if step is None:
        return NONE_GIVEN
    if not callable(step) and not isinstance(step, str):
        raise ConfigError(f"step={show_value(step)}: expected a function of the run.")
    settings.step = name_of(step)
    try:
        return (
            {}
            if isinstance(step, str)
            else {settings.step: UserFunction(b"", signature_of(step))}
        )
    except (TypeError, ValueError):
        raise ConfigError(
            f"step={settings.step}: has no signature that can be read. Give a Python function."
        ) from None


def name_of(function: RewardFunctionLike) -> str:
    if isinstance(function, str):
        return function
    function = _inner(function)
    name = getattr(function, "__name__", type(function).__name__)
    return GIVEN + (re.sub(r"\W", "", name) or "function")


def pickle_reward(name: str, function: Callable[..., Any]) -> UserFunction:
    """Pickle a function by value with its module: a notebook's, a closure or a lambda.

    name: its name in settings. Raises ConfigError without a readable signature, or if it cannot be pickled.
    """
    try:
        signature = signature_of(function)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name} has no signature that can be read. Give a Python function."
        ) from None
    module = sys.modules.get(getattr(_inner(function), "__module__", None) or "")
    try:
        return UserFunction(
            pickle_function(function, module), signature, _version(function)
        )
    except Exception as error:  # objects that it holds may raise anything
        raise ConfigError(
            f"{name} cannot be sent to other processes ({describe_error(error)}). "
            "Create such objects inside the function, at its first call."
        ) from None


def _inner(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


def _version(function: Any) -> str:
    """Hash the code, and the numbers and texts of its closure and defaults."""
    held: list[Any] = []
    while isinstance(function, partial):
        held += [*function.args, *function.keywords.items()]
        function = function.func
    if not hasattr(function, "__code__"):
        held += sorted(getattr(function, "__dict__", {}).items())
        function = type(function).__call__
    function = getattr(function, "__func__", function)
    held += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    held += [
        *(getattr(function, "__defaults__", None) or ()),
        getattr(function, "__code__", None),
    ]
    return hashlib.sha256(repr([_told(value) for value in held]).encode()).hexdigest()


def _told(value: Any) -> Any:
    if isinstance(value, CodeType):  # without the place where it was written
        return (
            value.co_code,
            value.co_names,
            [_told(constant) for constant in value.co_consts],
        )
    if isinstance(value, (list, tuple)):
        return [_told(part) for part in value]
    return (
        value
        if isinstance(value, (bool, int, float, str, bytes, type(None)))
        else type(value).__name__
    )
