"""Rules that several systems share: sizes, files, lengths and caps that follow from several of their keys."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

Recipe = Mapping[str, Any]
CAP = 16384  # tokens of a micro-batch where none is given
# Flags of `ray job submit`, in whose command a recipe stands.
JOB_FLAGS = (
    "address",
    "runtime-env-json",
    "working-dir",
)
TOOLS = "tools.py"
ENVIRONMENT = "environment.py:Environment"
PLACES_OF_EPISODES = (TOOLS, ENVIRONMENT)
"""Placeholders: turns have no effect without one of them."""


class Settings(dict[str, Any]):
    """formulas: how a setting was computed from their keys, with their values."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(values or {})
        self.formulas: dict[str, str] = {}

    def compute(self, key: str, value: Any, formula: str) -> Any:
        self[key] = value
        self.formulas[key] = formula
        return value


def above_0(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def number(recipe: Recipe, key: str, default: float) -> float:
    text = str(recipe.get(key)).lower()  # YAML reads 1e-6 as a text
    return float(text) if re.fullmatch(r"-?\d+\.?\d*(?:e[-+]?\d+)?", text) else default


def is_on(recipe: Recipe, key: str) -> bool:
    return str(recipe.get(key)).lower() == "true"


def leave_out(recipe: Recipe, *beginnings: str) -> dict[str, Any]:
    return {key: value for key, value in recipe.items() if not key.startswith(beginnings)}


def count(recipe: Recipe, key: str, default: int, to_decide: list[str]) -> int:
    value = recipe.get(key, default)
    if isinstance(value, int) and value > 0:
        return int(value)
    to_decide.append(f"{key}={value}: must be a whole number above 0. Using {default}.")
    return default


def add_mini_batches(
    recipe: Recipe,
    settings: Settings,
    to_decide: list[str],
    size_key: str,
    prompts_key: str,
    samples_key: str,
) -> None:
    """Divide the size of a step by the size of a mini-batch, in sequences, or in prompts without
    `samples_key`.
    """
    if size_key not in recipe:
        return
    size, *of_a_step = (
        above_0(recipe.get(key)) for key in (size_key, prompts_key, samples_key) if key
    )
    if not size or 0 in of_a_step:
        named = ", ".join(key for key in (size_key, prompts_key, samples_key) if key)
        to_decide.append(
            f"batch.mini_batches: {size_key}={recipe[size_key]} needs whole numbers above 0 of {named}."
        )
        return
    step = math.prod(of_a_step)
    names = [key for key in (prompts_key, samples_key) if key]
    factors = " x ".join(f"{key} {recipe[key]}" for key in names)
    mini_batches = max(1, round(step / size))
    settings.compute("batch.mini_batches", mini_batches, f"{factors} / {size_key} {size}")
    if step % size:
        to_decide.append(
            f"batch.mini_batches={mini_batches}: a step of {step} is not a multiple of {size_key}={size}."
        )


def updates_of_a_step(settings: Settings) -> int:
    """Return the optimiser steps of a step."""
    return int(settings.get("batch.mini_batches", 1)) * int(settings.get("batch.epochs", 1))


def ranks_of_a_model(settings: Settings) -> int:
    ways = ("tensor", "pipeline", "context")
    return math.prod(
        int(settings.get(f"policy.parallel.{way}_parallel", 1)) for way in ways
    )


def steps_to_updates(settings: Settings, *keys: str) -> None:
    """Multiply counts of steps, where a schedule of ours counts optimiser steps."""
    for key in keys:
        steps = settings.get(key)
        updates = updates_of_a_step(settings)
        if isinstance(steps, int) and updates > 1:
            formula = f"{steps} steps there x {updates} optimiser steps of a step"
            settings.compute(key, steps * updates, formula)


def updates_to_steps(settings: Settings, *keys: str) -> None:
    """Divide counts of optimiser steps, where ours counts steps."""
    for key in keys:
        count_there = above_0(settings.get(key))
        updates = updates_of_a_step(settings)
        if count_there and updates > 1:
            formula = f"{count_there} optimiser steps there / {updates} of a step"
            settings.compute(key, max(1, count_there // updates), formula)


def ask_for_ratios(settings: Settings, to_decide: list[str]) -> None:
    """Say where ratios begin in an asynchronous run, unless a correction is set."""
    correction = "algorithm.loss.rollout_correction.weights"
    if settings.get("rollout.max_staleness") and settings.get(correction, "none") == "none":
        to_decide.append(
            f"{correction}: ratios begin at the sampler's log-probs here, at the policy's before the step "
            "there. `token` begins as there, with weights."
        )


def function_of(path: str) -> str:
    """Return `module:function` of a dotted path."""
    module, _, name = path.rpartition(".")
    return f"{module}:{name}" if module and ":" not in path else path


def set_data_parallel(
    settings: Settings, nodes: int, of_a_node: int, shard: Any = -1
) -> None:
    """Divide the GPUs by those that share a model. shard: GPUs of one copy of it (HSDP), or -1."""
    gpus = nodes * of_a_node
    ranks = ranks_of_a_model(settings)
    settings.compute(
        "policy.data_parallel",
        max(1, gpus // ranks),
        f"{nodes} nodes x {of_a_node} GPUs / {ranks} of one model",
    )
    if 0 < above_0(shard) < gpus:
        formula = f"{gpus} GPUs / {shard} of one copy"
        settings.compute("policy.parallel.replicate", gpus // shard, formula)


def decay_all(settings: Settings) -> None:
    """Decay vectors too: the optimiser there has one group of parameters."""
    roles = (
        ("policy", "critic")
        if settings.get("algorithm.advantage") == "gae"
        else ("policy",)
    )
    for role in roles:
        if settings.get(f"{role}.optimizer.weight_decay"):
            settings[f"{role}.optimizer.weight_decay_on"] = "all"


def move_discount(
    settings: Settings, estimators: Sequence[str] = ("reinforce_plus_plus", "gigpo")
) -> None:
    """Write the discount to the setting of the estimator: one key there, two settings here."""
    if (
        settings.get("algorithm.advantage") in estimators
        and "algorithm.gae.gamma" in settings
    ):
        settings["algorithm.gamma"] = settings.pop("algorithm.gae.gamma")


def ask_for_critics_size(
    policy: Any, critic: Any, settings: Settings, to_decide: list[str]
) -> None:
    """policy, critic: prompts of a mini-batch."""
    if settings.get("algorithm.advantage") == "gae" and critic != policy:
        to_decide.append(
            f"batch.mini_batches: of policy and critic. There {policy} prompts of the policy's and {critic} "
            "of the critic's. Choose one."
        )


def name_episodes(
    key: str, placeholder: str, settings: Settings, to_decide: list[str]
) -> None:
    """Set a placeholder, with which the settings of turns keep their effect."""
    if not settings.get(key):
        settings[key] = placeholder
        to_decide.append(f"{key}={placeholder}: a placeholder. Name yours.")


def paths_of(value: Any) -> list[str]:
    return (
        [str(path) for path in value] or [""]
        if isinstance(value, list)
        else [str(value or "")]
    )


def set_validation(paths: Sequence[Any], settings: Settings, to_decide: list[str]) -> None:
    """Take the first file, and name the others: there is one here."""
    first, *other_paths = [str(path) for path in paths] or [""]
    if first:
        settings["data.validation"] = first
    if other_paths:
        to_decide.append(
            f"data.validation={first}: one file here. Join the others: {', '.join(other_paths)}."
        )


def shares_of(paths: Sequence[str], to_decide: list[str]) -> dict[str, float]:
    """Weigh files by their number of records: other systems join them."""
    sizes = [_records_of(Path(path).expanduser()) for path in paths]
    if all(sizes):
        return dict(zip(paths, map(float, sizes), strict=True))
    to_decide.append(
        "data.sources: equal weights here, a joined file there. Set each to its number of records."
    )
    return dict.fromkeys(paths, 1.0)


def _records_of(path: Path) -> int:
    try:
        if path.suffix == ".parquet":
            return int(pyarrow.parquet.read_metadata(path).num_rows)
        if path.suffix == ".jsonl":
            with path.open("rb") as lines:
                return sum(bool(line.strip()) for line in lines)
    except (OSError, pyarrow.ArrowException):
        pass
    return 0


def ask_for_steps(epochs: Any, settings: Settings, to_decide: list[str]) -> None:
    """Say how steps follow from epochs, unless they are set."""
    if "run.steps" not in settings:
        prompts = settings.get("batch.prompts_per_step", "batch.prompts_per_step")
        to_decide.append(
            f"run.steps: {epochs} epochs are {epochs} x the number of records / {prompts} steps."
        )


def fit_cap(settings: Settings, to_decide: list[str]) -> None:
    """Set a cap of micro-batches that the longest sequence goes into: other systems' caps bound no single
    sequence.
    """
    lengths = [
        settings.get("data.max_prompt_tokens", 1024),
        settings.get("rollout.sampling.max_new_tokens", 1024),
    ]
    cap = settings.get("policy.max_tokens_per_micro_batch")
    if not all(map(above_0, lengths)) or (cap is not None and not above_0(cap)):
        return
    plays = settings.get("rollout.environment") or settings.get("rollout.tools")
    turns = above_0(settings.get("rollout.max_turns", 8)) if plays else 1
    longest = lengths[0] + (
        above_0(settings.get("rollout.max_episode_tokens")) or turns * lengths[1]
    )
    of_a_rank = math.ceil(
        longest / (above_0(settings.get("policy.parallel.context_parallel")) or 1)
    )
    if cap is None:
        formula = f"the larger of {CAP} and 2 x {of_a_rank}, the longest sequence of a rank"
        cap = settings.compute(
            "policy.max_tokens_per_micro_batch", max(CAP, 2 * of_a_rank), formula
        )
        to_decide.append(
            f"policy.max_tokens_per_micro_batch={cap}: replaces sequences per micro-batch. Raise or lower it."
        )
    elif cap < of_a_rank:
        formula = f"the longest sequence of a rank, above {cap} there"
        settings.compute("policy.max_tokens_per_micro_batch", of_a_rank, formula)
        to_decide.append(
            f"policy.max_tokens_per_micro_batch={of_a_rank}: {cap} there, where a longer sequence is alone. "
            "The longest goes into it."
        )
