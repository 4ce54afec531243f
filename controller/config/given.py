"""Reward functions that a call is given as Python objects, in place of names in the configuration.

    ballast.fit(..., reward=f) --give_rewards--> reward.function: callable:f, and {"callable:f": f, pickled}

The settings that a run records say that much, and no more: such a run goes on where it is given its functions again.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from controller.config.file import LARGEST_FLOAT, shown
from controller.config.function_files import GIVEN
from controller.config.sections import RewardConfig
from workers.errors import ConfigError
from workers.user_code import UserFunction, given_function

RewardFunctionLike = Callable[..., Any] | str
Reward = RewardFunctionLike | Sequence[RewardFunctionLike] | Mapping[RewardFunctionLike, float]
"""A function, or its name as in the settings; or several of them, which are added up, each with a weight or with 1."""

GivenFunctions = Mapping[str, UserFunction]
"""By the name that stands for them in the settings."""

NONE_GIVEN: GivenFunctions = {}


def give_rewards(settings: RewardConfig, reward: Reward | None) -> GivenFunctions:
    """Put names for `reward` into the settings, in place of those there, and return its functions; None is no change.

    Raises ConfigError for a function that cannot be pickled, or two of one name.
    """
    if reward is None:
        return NONE_GIVEN
    several = isinstance(reward, (Mapping, list, tuple))
    functions: list[Any] = list(cast(Iterable[Any], reward)) if several else [reward]
    weights = list(reward.values()) if isinstance(reward, Mapping) else [1.0] * len(functions)
    if not all(callable(f) or isinstance(f, str) for f in functions) or not all(map(_is_weight, weights)):
        raise ConfigError(f"reward={shown(reward)}: expected a function, a list, or a mapping of functions to weights.")
    named: dict[str, RewardFunctionLike] = {}
    for function in functions:
        if name_of(function) in named:
            raise ConfigError(f"reward: two functions are named {name_of(function)}; rename one of them.")
        named[name_of(function)] = function
    settings.function = "" if several else name_of(functions[0])
    settings.functions = dict(zip(named, map(float, weights), strict=True)) if several else {}
    return {name: given_function(name, function) for name, function in named.items() if not isinstance(function, str)}


def _is_weight(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= LARGEST_FLOAT


def name_of(function: RewardFunctionLike) -> str:
    """The name of a function in the settings."""
    if isinstance(function, str):
        return function
    while isinstance(function, partial):
        function = function.func
    found = getattr(function, "__name__", type(function).__name__)
    return GIVEN + (re.sub(r"\W", "", found) or "function")
