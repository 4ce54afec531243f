"""AReaL: sizes are those of a step, norms of rewards and advantages say the estimator, backends the ranks."""

import re
from collections.abc import Mapping
from typing import Any

from ballast.migrate.rules import (
    Recipe,
    Settings,
    above_0,
    ask_for_steps,
    decay_all,
    is_on,
    leave_out,
    number,
)
from controller.config.file import leaves

REJECTION = "actor.rejection_sampling."
NORM = "actor.reward_norm."
WHITENED = "actor.adv_norm.std_level"
CORRECTION = "algorithm.loss.rollout_correction."
KEYS = (
    f"{REJECTION}level",
    f"{REJECTION}action",
    f"{REJECTION}metric",
    f"{NORM}mean_level",
    f"{NORM}std_level",
    f"{NORM}mean_leave1out",
    "actor.adv_norm.mean_level",
    WHITENED,
    "actor.discount",
    "actor.use_lora",
    "actor.use_decoupled_loss",
    "actor.overlong_reward_penalty",
    "actor.temperature",
    "actor.backend",
    "rollout.backend",
    "total_train_epochs",
)
WAYS = {"t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}


def prepare(recipe: Recipe, to_decide: list[str]) -> Mapping[str, Any]:
    """Leave out keys whose switch is off, and write the defaults of sections that are in use."""
    entries = dict(recipe)
    if is_on(entries, "actor.use_lora"):
        entries = {"actor.lora_rank": 32, "actor.lora_alpha": 16, **entries}
        if not entries.get("actor.target_modules"):
            entries.pop("actor.target_modules", None)
    else:
        entries = leave_out(entries, "actor.lora_", "actor.target_modules")
    if not is_on(entries, "actor.overlong_reward_penalty"):
        entries = leave_out(entries, "actor.overlong_")
    if any(key.startswith(REJECTION) for key in entries):
        entries = {f"{REJECTION}upper": 5.0, f"{REJECTION}level": "token", **entries}
    if "critic.path" in entries:
        entries = {"critic.eps_clip": 0.5, **entries}
    if isinstance(entries.get("critic.optimizer"), Mapping):  # ${actor.optimizer}
        entries |= dict(leaves({"critic.optimizer": entries.pop("critic.optimizer")}))
    return entries


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    _advantage(recipe, settings, to_decide)
    _rejection(recipe, settings, to_decide)
    set_ranks(recipe, settings, to_decide)
    ask_for_steps(recipe.get("total_train_epochs", 1), settings, to_decide)
    for key, split in (("data.train", "train"), ("data.validation", "test")):
        # dataset/gsm8k.py names the configuration, the examples the splits.
        if settings.get(key) == "openai/gsm8k":
            settings[key] = f"openai/gsm8k:main@{split}"
    if not str(recipe.get("actor.backend", "")).startswith("megatron"):
        decay_all(settings)


def _advantage(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    whitened = recipe.get(WHITENED) is not None
    mean = recipe.get(f"{NORM}mean_level")
    deviation = recipe.get(f"{NORM}std_level")
    discount = number(recipe, "actor.discount", 1.0)
    if "critic.path" in recipe:
        settings["algorithm.advantage"] = "gae"
        settings["algorithm.gae.gamma"] = discount
        settings["algorithm.gae.whiten"] = whitened
        return
    if mean != "group":
        name = "reinforce_plus_plus"
    elif deviation is None and is_on(recipe, f"{NORM}mean_leave1out"):
        name = "rloo"
    elif deviation is None and whitened:
        name = "reinforce_plus_plus_baseline"
    else:
        name = "grpo"
        settings["algorithm.normalize_by_std"] = deviation == "group"
    settings["algorithm.advantage"] = name
    whitens = name.startswith("reinforce_plus_plus")
    if whitens and discount != 1:
        settings["algorithm.gamma"] = discount
    if whitened and not whitens:
        to_decide.append(
            f"algorithm.advantage={name}: whitened over the tokens of a step too there, by adv_norm."
        )
    if whitens and not whitened:
        to_decide.append(
            f"algorithm.advantage={name}: it whitens, and there is no adv_norm there."
        )
    if mean == "batch" or deviation == "batch":
        to_decide.append(
            f"algorithm.advantage={name}: rewards are normalised over the step there, by reward_norm."
        )


def _rejection(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    """Weights come with rejection_sampling alone, and are those of the tokens that it keeps."""
    upper = settings.pop(f"{CORRECTION}rejection_high", None)
    level = recipe.get(f"{REJECTION}level")
    if (
        upper is None
        or level not in ("token", "sequence")
        or not is_on(recipe, "actor.use_decoupled_loss")
    ):
        settings.pop(f"{CORRECTION}cap", None)
        return
    if recipe.get(f"{REJECTION}metric", "ratio") != "ratio":
        settings.pop(f"{CORRECTION}cap", None)
        to_decide.append(
            f"{CORRECTION}rejection: by {recipe[f'{REJECTION}metric']} there, only by ratio here."
        )
        return
    settings[f"{CORRECTION}weights"] = level
    if recipe.get(f"{REJECTION}action", "mask") == "mask":
        settings[f"{CORRECTION}rejection"] = level
        settings[f"{CORRECTION}rejection_high"] = upper
        settings.setdefault(f"{CORRECTION}rejection_low", 1e-6)


def set_ranks(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    """Read `fsdp:d4p1t1`: ranks by way of parallelism."""
    policy = _of_backend(recipe.get("actor.backend"))
    if policy:
        settings["policy.data_parallel"] = policy.pop("d", 1)
        settings.update(
            {
                f"policy.parallel.{WAYS[way]}_parallel": ranks
                for way, ranks in policy.items()
            }
        )
    elif "actor.backend" in recipe:
        to_decide.append(
            f"policy.data_parallel: from actor.backend={recipe['actor.backend']}. Set policy.parallel too."
        )
    engines = _of_backend(recipe.get("rollout.backend"))
    if engines or settings.get("rollout.max_staleness"):
        settings["rollout.placement"] = "apart"
    if engines:
        settings["rollout.replicas"] = engines.get("d", 1)
        settings["rollout.tensor_parallel"] = engines.get("t", 1)
        if concurrent := above_0(settings.get("rollout.max_concurrent")):
            replicas = settings["rollout.replicas"]
            formula = f"max_concurrent_rollouts {concurrent} / {replicas} engines"
            settings.compute(
                "rollout.max_concurrent", max(1, concurrent // replicas), formula
            )


def _of_backend(value: Any) -> dict[str, int]:
    name = re.fullmatch(r"\w+:((?:[dtpce]\d+)+)", str(value))
    return (
        {way: int(ranks) for way, ranks in re.findall(r"([dtpce])(\d+)", name[1])}
        if name
        else {}
    )
