"""Recognise the system that a recipe of reinforcement learning belongs to.

keys, program --recognise_system--> "prime-rl", "orchestrator.batch_size, trainer.optim.lr, 2 of 3 keys"

A word that several systems use (`max_steps`, `model`) tells none of them. Without a key or a program that
only one system has, a recipe is refused.
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from controller.config.aliases import Counterpart
from workers.errors import ConfigError

MARKS = {
    "verl": ("actor_rollout_ref.",),
    "ROLL": ("actor_train.", "actor_infer."),
    "OpenRLHF": ("actor.adam.", "algo.", "ds.", "actor.model_name_or_path"),
    "NeMo-RL": (
        "grpo.",
        "loss_fn.",
        "policy.dtensor_cfg.",
        "policy.megatron_cfg.",
        "policy.generation.",
        "policy.model_name",
    ),
    "prime-rl": ("orchestrator.", "trainer.model.", "trainer.optim."),
    "SkyRL": (
        "trainer.policy.",
        "trainer.algorithm.",
        "trainer.placement.",
        "generator.",
        "environment.skyrl_gym.",
        "optimizer_config.",
    ),
    "AReaL": ("train_dataset.", "gconfig.", "rollout.agent.", "sglang."),
    "MindSpeed-RL": ("rl_config.", "megatron_training.", "generate_config."),
}
"""Beginnings of keys that only this system has."""
PROGRAMS = {
    "TRL": r"\btrl \w+|\w*(?:GRPO|RLOO|PPO)(?:Config|Trainer)\b|\b(?:grpo|rloo)(?:_\w+)?\.py",
    "OpenRLHF": r"openrlhf\.cli\.train_ppo\w*",
    "verl": r"verl\.trainer\.main_\w+|main_dapo",
    "SkyRL": r"\bskyrl\w*\.(?:train\.)?entrypoints\.\w+",
}
"""Names of programs that only this system has."""
LEAST_SHARE = 0.1
"""Of all keys. Files with a model's shape have one key in the table among forty."""
COMMON_WORDS = frozenset(
    (
        "batch_size",
        "data_parallel_size",
        "dtype",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "max_model_len",
        "max_steps",
        "model",
        "optim",
        "push",
        "seed",
        "tensor_parallel_size",
        "tools",
        "trust_remote_code",
    )
)
"""Keys of one system in the table, and of others outside of it."""


def recognise_system(
    recipe: Mapping[str, Any], rows: Sequence[Counterpart]
) -> tuple[str, str]:
    """Return the system, and the keys that tell it. Raises ConfigError if no key or program does."""
    systems = dict.fromkeys(row.system for row in rows)
    keys = {system: keys_of_system(system, recipe, rows) for system in systems}
    # the names of other systems' keys are ends or parts of these
    marks = {system: _count_beginnings(recipe, starts) for system, starts in MARKS.items()}
    program = getattr(recipe, "program", "")
    named = {system for system, text in PROGRAMS.items() if re.search(text, program)}
    system = max(
        systems,
        key=lambda name: (marks.get(name, 0), name in named, len(keys[name])),
    )
    others = [name for name in systems if name != system]
    first_keys = ", ".join(list(recipe)[:3])
    if not keys[system]:
        raise ConfigError(
            f"{first_keys}: not keys of a known system. Known are {', '.join(systems)}."
        )
    rivals = [name for name in others if len(keys[name]) >= len(keys[system])]
    exact_rows = [row for row in rows if "*" not in row.key]
    exact_keys = keys_of_system(system, recipe, exact_rows)
    rare_keys = {key for key in exact_keys if key.replace("-", "_") not in COMMON_WORDS}
    only_here = rare_keys.difference(*(keys[name] for name in others))
    is_marked = bool(marks.get(system)) or system in named
    is_ambiguous = len(keys[system]) < 2 or not only_here
    is_weak = len(keys[system]) < len(recipe) * LEAST_SHARE
    if not is_marked and (is_ambiguous or is_weak):
        candidates = " or ".join([system, *rivals])
        raise ConfigError(
            f"{first_keys}: too few keys that one system alone has, it may be {candidates}. Give the "
            "command's first words too, or the file with the sizes of a step."
        )
    telling = [key for key in recipe if key.startswith(MARKS.get(system, ()))]
    telling = telling or keys[system]
    rest = f" and {len(telling) - 3} more" if len(telling) > 3 else ""
    evidence = f"{', '.join(telling[:3])}{rest}, {len(keys[system])} of {len(recipe)} keys"
    return system, evidence


def keys_of_system(
    system: str, recipe: Mapping[str, Any], rows: Sequence[Counterpart]
) -> list[str]:
    # By a set of names: `matches` for every key and row took eight times as long.
    patterns = [replace_hyphens(row.key) for row in rows if row.system == system]
    names = {pattern for pattern in patterns if "*" not in pattern}
    families = [pattern for pattern in patterns if "*" in pattern]
    return [
        key
        for key in recipe
        if replace_hyphens(key) in names
        or any(fnmatchcase(replace_hyphens(key), family) for family in families)
    ]


def matches(row: Counterpart, key: str) -> bool:
    """Whether the row is of this key: hyphens are underscores, `*` stands for any name."""
    pattern = replace_hyphens(row.key)
    name = replace_hyphens(key)
    return name == pattern if "*" not in pattern else fnmatchcase(name, pattern)


@cache
def replace_hyphens(key: str) -> str:
    return key.replace("-", "_")


def _count_beginnings(recipe: Mapping[str, Any], starts: str | tuple[str, ...]) -> int:
    return sum(key.startswith(starts) for key in recipe)
