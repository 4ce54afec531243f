"""ROLL: sizes of updates are of one rank, switches say which coefficients count, agentic recipes count
trajectories.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from ballast.migrate.rules import (
    Recipe,
    Settings,
    above_0,
    decay_all,
    is_on,
    leave_out,
    number,
    paths_of,
    ranks_of_a_model,
    set_validation,
)

TRAIN = "actor_train."
SIZE = f"{TRAIN}training_args.per_device_train_batch_size"
ACCUMULATION = f"{TRAIN}training_args.gradient_accumulation_steps"
LORA = f"{TRAIN}model_args.lora_"
FILES = f"{TRAIN}data_args.file_name"
ENGINES = "actor_infer.device_mapping"
GROUP = "train_env_manager.group_size"
REWARDS = (
    "adv_estimator",
    "whiten_advantages",
    "norm_mean_type",
    "norm_std_type",
    "kl_loss_coef",
    "init_kl_coef",
)
KEYS = (
    SIZE,
    ACCUMULATION,
    FILES,
    GROUP,
    f"{TRAIN}device_mapping",
    ENGINES,
    f"{TRAIN}strategy_args.strategy_name",
    "validation.data_args.file_name",
    "whiten_advantages",
    "norm_mean_type",
    "add_token_level_kl",
    "use_kl_loss",
    "use_pg_clip_range",
    "pg_clip_low",
    "pg_clip_high",
    "dual_clip_loss",
    "max_tokens_per_step",
    "async_generation_ratio",
)


def prepare(recipe: Recipe, to_decide: list[str]) -> Mapping[str, Any]:
    """Leave out coefficients whose switch is off, and name a student as the actor that it is."""
    off = (
        []
        if is_on(recipe, "add_token_level_kl")
        else ["init_kl_coef", "target_kl", "kl_horizon", "kl_penalty"]
    )
    off += [] if is_on(recipe, "use_kl_loss") else ["kl_loss_coef"]
    off += [] if recipe.get(f"{LORA}target") else [LORA]
    off += ["actor_infer.generating_args.num_return_sequences"] if GROUP in recipe else []
    if any(key.startswith("student_train.") for key in recipe):
        named = {
            re.sub(r"^student_(train|infer)\.", r"actor_\1.", key): value
            for key, value in recipe.items()
        }
        return leave_out(named, *off, *REWARDS) | {"adv_estimator": "pure_opd"}
    return leave_out(recipe, *off)


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    _agentic(recipe, settings, to_decide)
    _files(recipe, settings, to_decide)
    _advantage(recipe, settings, to_decide)
    _loss(recipe, settings)
    if f"{LORA}target" in recipe:
        settings.setdefault("model.lora.rank", 8)
        settings.setdefault("model.lora.alpha", 2.0 * settings["model.lora.rank"])
    if not str(recipe.get(f"{TRAIN}strategy_args.strategy_name", "")).startswith(
        "megatron"
    ):
        decay_all(settings)
    set_ranks(recipe, settings)
    _mini_batches(recipe, settings, to_decide)


def _agentic(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    group = above_0(recipe.get(GROUP))
    if not group:
        return
    settings["rollout.samples_per_prompt"] = group
    if trajectories := above_0(recipe.get("rollout_batch_size")):
        formula = f"rollout_batch_size {trajectories} / {GROUP} {group}"
        settings.compute("batch.prompts_per_step", max(1, trajectories // group), formula)
    of_a_turn = above_0(recipe.get("max_tokens_per_step"))
    if of_a_turn:
        longest = settings.get("rollout.sampling.max_new_tokens", of_a_turn)
        settings["rollout.sampling.max_new_tokens"] = min(of_a_turn, longest)
    to_decide.append(
        "rollout.environment: write that of custom_envs, in place of reward.function. Set "
        "rollout.max_turns with it."
    )


def _files(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    train, *other_files = paths_of(recipe.get(FILES))
    if other_files:
        to_decide.append(
            f"data.train: {train}, {', '.join(other_files)}, by domain_interleave_probs of their domains. "
            "Set data.sources to a share of each."
        )
    elif train:
        settings["data.train"] = train
    set_validation(
        paths_of(recipe.get("validation.data_args.file_name")), settings, to_decide
    )


def _advantage(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    """Rewards are normalised first, whatever the estimator, and advantages whitened last."""
    whitened = is_on(recipe, "whiten_advantages")
    name = settings.get("algorithm.advantage")
    if name == "none":
        settings.setdefault("algorithm.loss.distillation.coefficient", 1.0)
        return
    if name == "gae":
        settings["algorithm.gae.whiten"] = whitened
    if name == "reinforce_plus_plus" and recipe.get("norm_mean_type") == "group":
        baseline = whitened and recipe.get("norm_std_type") is None
        name = settings["algorithm.advantage"] = (
            "reinforce_plus_plus_baseline" if baseline else "grpo"
        )
        settings["algorithm.normalize_by_std"] = recipe.get("norm_std_type") == "group"
    if name == "reinforce_plus_plus" and not whitened:
        to_decide.append(
            f"algorithm.advantage={name}: it whitens, and whiten_advantages is off there."
        )
    if name == "grpo" and whitened:
        to_decide.append(
            f"algorithm.advantage={name}: whitened over the tokens of a step too there."
        )


def _loss(recipe: Recipe, settings: Settings) -> None:
    if is_on(recipe, "add_token_level_kl"):
        settings.setdefault("algorithm.kl_in_reward.coefficient", 0.2)
    if is_on(recipe, "use_pg_clip_range"):
        settings["algorithm.loss.clip_low"] = number(recipe, "pg_clip_low", 0.2)
        settings["algorithm.loss.clip_high"] = number(recipe, "pg_clip_high", 0.2)
    if is_on(recipe, "dual_clip_loss"):
        clip = number(recipe, "pg_clip", 0.2)
        settings.compute(
            "algorithm.loss.dual_clip", 1 + 2 * clip, f"1 + 2 x pg_clip {clip}"
        )


def set_ranks(recipe: Recipe, settings: Settings) -> None:
    ratio = recipe.get("async_generation_ratio")
    if isinstance(ratio, int | float) and math.isfinite(ratio):
        formula = f"async_generation_ratio {ratio}, rounded up"
        settings.compute("rollout.max_staleness", math.ceil(ratio), formula)
    sharing = ranks_of_a_model(settings)
    trainers = _gpus(recipe.get(f"{TRAIN}device_mapping"))
    if len(trainers) >= sharing:
        formula = f"{len(trainers)} GPUs of {TRAIN}device_mapping / {sharing} of one model"
        settings.compute("policy.data_parallel", len(trainers) // sharing, formula)
    engines = _gpus(recipe.get(ENGINES))
    if engines and (settings.get("rollout.max_staleness") or not engines & trainers):
        settings["rollout.placement"] = "apart"
        ranks = settings.get("rollout.tensor_parallel", 1)
        formula = f"{len(engines)} GPUs of {ENGINES} / {ranks} of one engine"
        settings.compute("rollout.replicas", max(1, len(engines) // ranks), formula)


def _gpus(mapping: Any) -> set[int]:
    """Return the GPUs of `list(range(0,8)) + list(range(16,24))`."""
    ranges = re.findall(r"range\((\d+), *(\d+)\)", str(mapping))
    return {gpu for start, end in ranges for gpu in range(int(start), int(end))}


def _mini_batches(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    if SIZE not in recipe:
        return
    of_a_rank = above_0(recipe[SIZE]) * above_0(recipe.get(ACCUMULATION, 1))
    prompts = above_0(settings.get("batch.prompts_per_step"))
    samples = prompts * above_0(settings.get("rollout.samples_per_prompt"))
    ranks = settings.get("policy.data_parallel")
    if of_a_rank and samples and ranks:
        accumulated = recipe.get(ACCUMULATION, 1)
        formula = f"{samples} samples of a step / ({SIZE} {recipe[SIZE]} x {ACCUMULATION} {accumulated}"
        formula += f" x {ranks} ranks)"
        settings.compute(
            "batch.mini_batches", max(1, round(samples / ranks / of_a_rank)), formula
        )
        return
    to_decide.append(
        f"batch.mini_batches: rollout_batch_size x num_return_sequences_in_group / ({SIZE}="
        f"{recipe[SIZE]} x gradient_accumulation_steps x data-parallel ranks)."
    )
