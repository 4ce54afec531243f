"""Pair TRL's reward functions with their weights, and name its tools.

reward_funcs=[f, g], reward_weights=[1.0, 0.5]
    --add_rewards--> reward.functions: {train.py:f: 1.0, train.py:g: 0.5}
"""

from collections.abc import Mapping
from typing import Any

from ballast.migrate.rules import Settings

FUNCTIONS = "reward_funcs"
WEIGHTS = "reward_weights"
TOOLS = "tools"
CLOSEST = {
    "accuracy_reward": "`workers.reward_functions:math`, which compares with the column `answer`",
    "reasoning_accuracy_reward": "`workers.reward_functions:math`, which reads no box inside of thoughts",
    "get_soft_overlong_punishment": "`reward.overlong_tokens`",
}
"""TRL's own functions that have a counterpart."""


def add_rewards(theirs: Mapping[str, Any], ours: Settings, to_decide: list[str]) -> None:
    """Set the functions or the model that score, and say what to change in them."""
    if FUNCTIONS not in theirs:
        return
    names = _as_list(theirs[FUNCTIONS])
    weights = _as_list(theirs.get(WEIGHTS)) or [1.0] * len(names)
    unclear = [name for name in names if not isinstance(name, str) or "$" in name]
    if (
        unclear
        or len(weights) != len(names)
        or not all(isinstance(weight, int | float) for weight in weights)
    ):
        to_decide.append(
            f"reward.functions: {FUNCTIONS}={names} with {WEIGHTS}={weights}. Name each with its weight."
        )
        return
    models = [name for name in names if "/" in name and ":" not in name]
    functions = {
        _as_reference(name): float(weight)
        for name, weight in zip(names, weights, strict=True)
        if name not in models
    }
    if models:
        ours["reward.model.path"] = models[0]
    for model in models[1:]:
        to_decide.append(
            f"reward.model.path={models[0]}: one model here. Left out is {model}."
        )
    if list(functions.values()) == [1.0]:
        ours["reward.function"] = next(iter(functions))
    elif functions:
        ours["reward.functions"] = functions
    for reference in functions:
        module, _, name = reference.rpartition(":")
        # A script may define the same name.
        closest = CLOSEST.get(name) if module.startswith("trl.") else None
        change = (
            f"Closest is {closest}"
            if closest
            else "Take `responses`, texts, in place of TRL's `completions`"
        )
        to_decide.append(f"reward.functions: {reference}. {change}.")


def name_tools(theirs: Mapping[str, Any], to_decide: list[str]) -> None:
    if tools := _as_list(theirs.get(TOOLS)):
        names = ", ".join(str(tool).rpartition(":")[2] for tool in tools)
        to_decide.append(
            f"rollout.tools: put {names} into a file of their own and name it. All its public functions are "
            "tools."
        )


def _as_reference(name: str) -> str:
    """`module:function` of a name in a script, `module.function`, or one of TRL's own."""
    if ":" in name:
        return name
    module, _, function = name.rpartition(".")
    return f"{module or 'trl.rewards'}:{function}"


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
