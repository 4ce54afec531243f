"""TRL: completions of a step over those of a group, of one GPU unless the recipe says their number."""

import re
from collections.abc import Mapping
from typing import Any

from ballast.migrate.rules import (
    Recipe,
    Settings,
    above_0,
    ask_for_steps,
    count,
    updates_of_a_step,
    updates_to_steps,
)
from ballast.migrate.systems.trl_rewards import (
    FUNCTIONS,
    TOOLS,
    WEIGHTS,
    add_rewards,
    name_tools,
)

PROCESSES = "num_processes"
TRAINERS = (
    ("AsyncGRPOTrainer", r"\bAsyncGRPO(?:Config|Trainer)\b|\basync_grpo\w*\.py"),
    ("RLOOTrainer", r"\bRLOO(?:Config|Trainer)\b|\btrl rloo\b|\brloo(?:_\w+)?\.py"),
    ("PPOTrainer", r"\bPPO(?:Config|Trainer)\b|\bppo(?:_\w+)?\.py"),
)
"""Trainers with defaults of their own, and the names of their programs and classes."""
KEYS = (
    "generation_batch_size",
    "steps_per_generation",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "num_train_epochs",
    "total_episodes",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    FUNCTIONS,
    WEIGHTS,
    TOOLS,
)


def prepare(recipe: Recipe, to_decide: list[str]) -> Mapping[str, Any]:
    """Put the trainer first, whose row holds its defaults, and rename keys that mean another
    thing with it.
    """
    program = getattr(recipe, "program", "")
    keys = apply_switches(recipe)
    if not program:
        to_decide.append(
            "algorithm.advantage: GRPO's, as the file names no trainer. For another, migrate its command: "
            "`trl rloo`, `trl sft` or `trl dpo`, with the keys as flags."
        )
    trainer = next((name for name, pattern in TRAINERS if re.search(pattern, program)), "")
    if trainer == "RLOOTrainer" and "beta" in keys:
        keys["kl_coef"] = keys.pop("beta")  # in the reward
    if trainer == "PPOTrainer" and "sft_model_path" in keys:
        keys["model_name_or_path"] = keys.pop("sft_model_path")
    return {"trainer": trainer} | keys if trainer else keys


def apply_switches(recipe: Recipe) -> dict[str, Any]:
    """Return the keys that count: `no_x` is x=false, adapters need use_peft, warm-up below 1 is a share."""
    keys = {
        key: value
        for key, value in recipe.items()
        if not (key.startswith("no_") and value is True)
    }
    keys |= {key.removeprefix("no_"): False for key in recipe.keys() - keys.keys()}
    warmup = keys.get("warmup_steps")
    if isinstance(warmup, float) and 0 < warmup < 1:
        keys["warmup_ratio"] = keys.pop("warmup_steps")
    if "LoraConfig" in getattr(recipe, "program", ""):
        return {"lora_r": 8, "lora_alpha": 8} | keys
    if keys.pop("use_peft", False) is True:
        return {"lora_r": 16, "lora_alpha": 32} | keys
    without = {key: value for key, value in keys.items() if not key.startswith("lora_")}
    return without | ({"lora_r": 0} if "lora_r" in keys else {})


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    add_rewards(recipe, settings, to_decide)
    name_tools(recipe, to_decide)
    name_data(recipe, settings)
    choose_modules(settings, to_decide)
    _add_sizes(recipe, settings, to_decide)
    if recipe.get("max_steps", -1) != -1:
        updates = count(recipe, "max_steps", 100, to_decide)
        of_a_step = updates_of_a_step(settings)
        formula = f"max_steps {updates} / {of_a_step} optimiser steps of a step"
        settings.compute("run.steps", max(1, updates // of_a_step), formula)
    if episodes := above_0(recipe.get("total_episodes")):
        prompts = settings["batch.prompts_per_step"]
        formula = f"total_episodes {episodes} / {prompts} prompts of a step"
        settings.compute("run.steps", max(1, episodes // prompts), formula)
    of_processes = "total_episodes" in recipe or "generation_batch_size" in recipe
    if of_processes and "run.steps" in settings and not above_0(recipe.get(PROCESSES)):
        to_decide.append(
            f"run.steps={settings['run.steps']}: of one GPU, like a step. Change both."
        )
    ask_for_steps(recipe.get("num_train_epochs", 3), settings, to_decide)
    updates_to_steps(settings, "run.checkpoint_every", "validation.every")
    if settings.get("algorithm.loss.aggregation") == "sequence_mean_token_sum_norm":
        length = settings.get("rollout.sampling.max_new_tokens", 512)
        settings.compute(
            "algorithm.loss.constant_length", length, f"max_completion_length {length}"
        )
    if "data.max_prompt_tokens" not in settings:
        to_decide.append(
            "data.max_prompt_tokens: without a limit there, and longer prompts are dropped here. Set yours."
        )
    if "rollout.max_turns" in settings:  # the first turn, and one after each round of calls
        rounds = settings["rollout.max_turns"]
        length = settings.get("rollout.sampling.max_new_tokens", 512)
        settings.compute(
            "rollout.max_turns", rounds + 1, f"max_tool_calling_iterations {rounds} + 1"
        )
        formula = f"max_completion_length {length}, of all turns there"
        settings.compute("rollout.max_episode_tokens", length, formula)
    if recipe.get("trainer") == "PPOTrainer":  # one optimiser has both models
        of_policy = {
            key: value
            for key, value in settings.items()
            if key.startswith("policy.optimizer.")
        }
        settings.update(
            {key.replace("policy", "critic", 1): value for key, value in of_policy.items()}
        )
    if recipe.get("trainer") == "AsyncGRPOTrainer":
        to_decide.append(
            f"rollout.max_staleness={settings['rollout.max_staleness']}: in updates of the engines' weights "
            "there, in steps here. Set yours."
        )


def _add_sizes(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    group = above_0(settings.get("rollout.samples_per_prompt")) or 8
    accumulated = count(recipe, "gradient_accumulation_steps", 1, to_decide)
    of_a_device = count(recipe, "per_device_train_batch_size", 8, to_decide)
    processes = above_0(recipe.get(PROCESSES)) or 1
    of_all = (
        of_a_device
        * count(recipe, "steps_per_generation", accumulated, to_decide)
        * processes
    )
    completions = count(recipe, "generation_batch_size", of_all, to_decide)
    update = of_a_device * accumulated * processes
    size = f"per_device_train_batch_size {of_a_device} x gradient_accumulation_steps {accumulated}"
    size += f" x {processes} processes"
    source = _name_generation(recipe, completions, size)
    prompts = max(1, completions // group)
    settings.compute(
        "batch.prompts_per_step", prompts, f"{source} / num_generations {group}"
    )
    mini_batches = max(1, completions // update)
    if recipe.get("trainer") != "PPOTrainer":
        settings.compute(
            "batch.mini_batches", mini_batches, f"{completions} completions / ({size})"
        )
    if above_0(recipe.get(PROCESSES)):
        return
    if "generation_batch_size" in recipe:
        to_decide.append(
            f"batch.mini_batches={mini_batches}: of one GPU. Divide it by yours."
        )
    else:
        to_decide.append(
            f"batch.prompts_per_step={prompts}: of one GPU. Multiply it by yours."
        )


def _name_generation(recipe: Recipe, completions: int, size: str) -> str:
    if "generation_batch_size" in recipe:
        return f"generation_batch_size {completions}"
    if "steps_per_generation" in recipe:
        device = recipe.get("per_device_train_batch_size", 8)
        processes = above_0(recipe.get(PROCESSES)) or 1
        steps = recipe["steps_per_generation"]
        return f"per_device_train_batch_size {device} x steps_per_generation {steps} x {processes} processes"
    return size


def name_data(recipe: Recipe, settings: Settings) -> None:
    """`name:configuration@split`, and the test split where TRL's scripts evaluate."""
    name = recipe.get("dataset_name")
    if not isinstance(name, str) or "$" in name:
        return
    if recipe.get("dataset_config"):
        name = f"{name}:{recipe['dataset_config']}"
    split = recipe.get("dataset_train_split")
    settings["data.train"] = f"{name}@{split}" if split else name
    if recipe.get("eval_strategy", "no") not in ("no", False, None):
        settings["data.validation"] = f"{name}@{recipe.get('dataset_test_split') or 'test'}"


def choose_modules(settings: Settings, to_decide: list[str]) -> None:
    """peft has a list for every model, which names two projections for most."""
    modules = str(settings.get("model.lora.target_modules", ""))
    if not re.fullmatch(r"[\w.,-]*", modules):
        del settings["model.lora.target_modules"]
        to_decide.append(
            f"model.lora.target_modules: {modules} there, an expression. Set the modules' names."
        )
        return
    if settings.get("model.lora.rank") == 0:
        to_decide.append(
            "model.lora.rank=0: lora_r is without use_peft there. Set a rank to train adapters."
        )
    if settings.get("model.lora.rank") and "model.lora.target_modules" not in settings:
        modules = settings["model.lora.target_modules"] = "q_proj,v_proj"
        to_decide.append(
            f"model.lora.target_modules={modules}: peft's own, of Llama and Qwen. Set those of your model."
        )
