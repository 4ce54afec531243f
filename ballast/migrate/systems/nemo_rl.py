"""NeMo-RL: sizes of updates in sequences, schedules in steps, sections that `enabled` switches off."""

import math
from collections.abc import Mapping
from typing import Any

from ballast.migrate.rules import (
    Recipe,
    Settings,
    above_0,
    add_mini_batches,
    decay_all,
    is_on,
    leave_out,
    number,
    ranks_of_a_model,
    steps_to_updates,
    updates_of_a_step,
)

SIZES = (
    "policy.train_global_batch_size",
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
)
SHAPING = "grpo.reward_shaping."
SCHEDULER = "policy.scheduler"
COLOCATED = "policy.generation.colocated."
GPUS = ("cluster.num_nodes", "cluster.gpus_per_node")
GPUS_OF_ENGINES = (f"{COLOCATED}resources.num_nodes", f"{COLOCATED}resources.gpus_per_node")
MEGATRON = "policy.megatron_cfg."
LORA = "policy.dtensor_cfg.lora_cfg."
CAP = "loss_fn.truncated_importance_sampling_ratio"
CORRECTION = "algorithm.loss.rollout_correction."
LEAVE_ONE_OUT = "use_leave_one_out_baseline"
KEYS = (
    SIZES[0],
    SCHEDULER,
    *GPUS,
    *GPUS_OF_ENGINES,
    "policy.dtensor_cfg.enabled",
    f"{MEGATRON}enabled",
    f"{MEGATRON}optimizer.min_lr",
    f"{SHAPING}overlong_buffer_length",
    f"{SHAPING}overlong_buffer_penalty",
    f"{SHAPING}max_response_length",
    f"grpo.{LEAVE_ONE_OUT}",
    f"grpo.adv_estimator.{LEAVE_ONE_OUT}",
    "grpo.adv_estimator.minus_baseline",
    "grpo.max_num_epochs",
    "loss_fn.use_on_policy_kl_approximation",
)
SCHEDULES = {"ConstantLR": "constant", "CosineAnnealingLR": "cosine", "LinearLR": "linear"}


def prepare(recipe: Recipe, to_decide: list[str]) -> Mapping[str, Any]:
    """Leave out sections that are not enabled, and FSDP2's optimiser beside Megatron's."""
    switches = [
        key for key, value in recipe.items() if key.endswith(".enabled") and value is False
    ]
    off = tuple(
        key.removesuffix("enabled") for key in switches if key != f"{COLOCATED}enabled"
    )
    entries = {
        key: value
        for key, value in recipe.items()
        if key.endswith(".enabled") or not key.startswith(off)
    }
    if is_on(recipe, f"{MEGATRON}enabled"):
        return leave_out(entries, "policy.dtensor_cfg.", "policy.optimizer", SCHEDULER)
    if is_on(recipe, f"{LORA}match_all_linear") or not recipe.get(f"{LORA}target_modules"):
        entries.pop(f"{LORA}target_modules", None)
    return leave_out(entries, MEGATRON)


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    add_mini_batches(recipe, settings, to_decide, *SIZES)
    set_optimizer(recipe, settings, to_decide)
    _advantage(recipe, settings, to_decide)
    _loss(recipe, settings, to_decide)
    _shaping(recipe, settings)
    set_ranks(recipe, settings)
    if "grpo.max_num_epochs" in recipe and not is_on(recipe, "grpo.async_grpo.enabled"):
        to_decide.append(
            f"run.steps={settings.get('run.steps', 100)}: fewer there, if {recipe['grpo.max_num_epochs']} x "
            f"the number of records / {settings.get('batch.prompts_per_step', 'batch.prompts_per_step')} "
            "are fewer."
        )


def set_optimizer(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    if is_on(recipe, f"{MEGATRON}enabled"):
        steps_to_updates(
            settings, "policy.optimizer.warmup_steps", "policy.optimizer.total_steps"
        )
        least = number(recipe, f"{MEGATRON}optimizer.min_lr", 0.0)
        if least and settings.get("policy.optimizer.schedule", "constant") != "constant":
            share = least / settings.get("policy.optimizer.learning_rate", 1e-6)
            formula = f"min_lr {least} / {least / share:g}, the learning rate"
            settings.compute("policy.optimizer.final_learning_rate_ratio", share, formula)
        return
    decay_all(settings)
    parts = recipe.get(SCHEDULER)
    for part in parts if isinstance(parts, list) else []:
        name = str(part.get("name", "")).rpartition(".")[2]
        arguments = part.get("kwargs") or {}
        if name == "LinearLR" and arguments.get("start_factor", 1 / 3) < arguments.get(
            "end_factor", 1.0
        ):
            steps = arguments.get("total_iters", 5)
            updates = updates_of_a_step(settings)
            formula = (
                f"total_iters {steps} of LinearLR x {updates} optimiser steps of a step"
            )
            settings.compute("policy.optimizer.warmup_steps", steps * updates, formula)
        elif name in SCHEDULES:
            settings["policy.optimizer.schedule"] = SCHEDULES[name]
        elif name:
            to_decide.append(
                f"policy.optimizer.schedule: {name} has no counterpart. Choose one."
            )


def _advantage(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    if settings.get("algorithm.advantage") == "reinforce_plus_plus_baseline":
        if recipe.get("grpo.adv_estimator.minus_baseline") is False:
            settings["algorithm.advantage"] = "reinforce_plus_plus"
    elif any(
        is_on(recipe, f"grpo.{section}{LEAVE_ONE_OUT}")
        for section in ("", "adv_estimator.")
    ):
        if settings.get("algorithm.normalize_by_std", True):
            to_decide.append(
                "algorithm.advantage=grpo: mean and deviation of the group's other samples there, of all "
                "here. `rloo` has that mean, and no deviation."
            )
        else:
            settings["algorithm.advantage"] = "rloo"


def _loss(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    if settings.get("algorithm.loss.kl_coefficient"):
        on_policy = is_on(recipe, "loss_fn.use_on_policy_kl_approximation")
        settings["algorithm.loss.kl_correction"] = (
            "importance" if on_policy else "straight_through"
        )
    if settings.get(f"{CORRECTION}rejection", "none") != "none":
        settings[f"{CORRECTION}rejection_high"] = number(recipe, CAP, 2.0)
    elif settings.get(f"{CORRECTION}weights") == "token" and recipe.get(CAP) is None:
        settings[f"{CORRECTION}cap"] = 1e6
        to_decide.append(
            f"{CORRECTION}cap=1000000.0: weights have no cap there. 2 is the default here."
        )


def _shaping(recipe: Recipe, settings: Settings) -> None:
    """The penalty begins a buffer before max_response_length, and goes on to fall behind it."""
    buffer = above_0(recipe.get(f"{SHAPING}overlong_buffer_length"))
    if not buffer:
        return
    longest = settings.get("rollout.sampling.max_new_tokens", 1024)
    tokens = (
        longest - (above_0(recipe.get(f"{SHAPING}max_response_length")) or longest) + buffer
    )
    if tokens > 0:
        penalty = number(recipe, f"{SHAPING}overlong_buffer_penalty", 1.0)
        formula = f"overlong_buffer_length {buffer}, max_response_length and max_new_tokens {longest}"
        settings.compute("reward.overlong_tokens", tokens, formula)
        formula = f"overlong_buffer_penalty {penalty} x {tokens} / overlong_buffer_length {buffer}"
        settings.compute("reward.overlong_penalty", penalty * tokens / buffer, formula)


def set_ranks(recipe: Recipe, settings: Settings) -> None:
    if GPUS[1] not in recipe:
        return
    gpus = _product(recipe, GPUS)
    if settings.get("rollout.placement") == "apart":
        of_engines = _product(recipe, GPUS_OF_ENGINES)
        ranks = settings.get("rollout.tensor_parallel", 1)
        formula = f"{of_engines} GPUs of engines / {ranks} of one engine"
        settings.compute("rollout.replicas", max(1, of_engines // ranks), formula)
        gpus -= of_engines
    ranks = ranks_of_a_model(settings)
    settings.compute(
        "policy.data_parallel", max(1, gpus // ranks), f"{gpus} GPUs / {ranks} of one model"
    )


def _product(recipe: Recipe, keys: tuple[str, ...]) -> int:
    return math.prod(above_0(recipe.get(key)) or 1 for key in keys)
