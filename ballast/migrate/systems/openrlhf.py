"""OpenRLHF: sizes in sequences, lengths of prompt and response together, a KL in the reward or the loss."""

from collections.abc import Mapping
from typing import Any

from ballast.migrate.rules import (
    JOB_FLAGS,
    Recipe,
    Settings,
    above_0,
    add_mini_batches,
    ask_for_ratios,
    ask_for_steps,
    count,
    move_discount,
    set_data_parallel,
    shares_of,
)

SIZES = ("train.batch_size", "rollout.batch_size", "rollout.n_samples_per_prompt")
KEYS = (
    SIZES[0],
    "actor.num_nodes",
    "actor.num_gpus_per_node",
    "algo.kl.use_loss",
    "algo.advantage.is_correction_threshold",
    "data.max_len",
    "data.max_images_per_prompt",
    "data.prompt_dataset",
    "data.prompt_probs",
    "reward.remote_url",
    "train.agent_func_path",
    "train.async_enable",
    "train.async_queue_size",
)
PRESENT_NAMES = {
    "pretrain": "actor.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "agent_func_path": "train.agent_func_path",
    "normalize_reward": "reward.normalize_enable",
    "aux_loss_coef": "actor.aux_loss_coef",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "adam_betas": "actor.adam.betas critic.adam.betas",
    "l2": "actor.adam.weight_decay critic.adam.weight_decay",
    "lr_scheduler": "actor.lr_scheduler critic.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio critic.lr_warmup_ratio",
    "max_norm": "actor.max_norm critic.max_norm",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "input_key": "data.input_key",
    "max_len": "data.max_len",
    "label_key": "data.label_key",
    "apply_chat_template": "data.apply_chat_template",
    "input_template": "data.input_template",
    "max_samples": "data.max_samples",
    "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "generate_max_len": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "train_batch_size": "train.batch_size",
    "max_epochs": "train.max_epochs",
    "num_episodes": "train.num_episodes",
    "micro_train_batch_size": "train.micro_batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "seed": "train.seed",
    "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "use_kl_loss": "algo.kl.use_loss",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_estimator": "algo.kl.estimator",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "policy_loss_type": "actor.policy_loss_type",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "entropy_loss_coef": "actor.entropy_coef",
    "value_clip": "critic.value_clip",
    "freezing_actor_steps": "critic.freezing_steps",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "vllm_is_correction_type": "algo.advantage.is_correction_type",
    "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "colocate_all_models": "train.colocate_all",
    "async_train": "train.async_enable",
    "async_queue_size": "train.async_queue_size",
    "vllm_enable_sleep": "vllm.enable_sleep",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "zero_stage": "ds.zero_stage",
    "adam_offload": "ds.adam_offload",
    "bf16": "ds.bf16",
    "flash_attn": "ds.flash_attn",
    "ring_attn_size": "ds.ring_attn_size",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "target_modules": "ds.lora.target_modules",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "eval_dataset": "eval.dataset",
    "eval_steps": "eval.steps",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "save_path": "ckpt.output_dir",
    "save_steps": "ckpt.save_steps",
    "load_checkpoint": "ckpt.load_enable",
}
"""Flags of OpenRLHF before it had dotted ones. Some became two."""


def prepare(recipe: Recipe, to_decide: list[str]) -> Mapping[str, Any]:
    """Take the present names, and a data set of validations only where there are some."""
    keys: dict[str, Any] = {}
    for key, value in recipe.items():
        if key not in JOB_FLAGS:
            keys |= dict.fromkeys(
                PRESENT_NAMES.get(key.replace("-", "_"), key).split(), value
            )
    if not above_0(keys.get("eval.steps")):
        keys.pop("eval.dataset", None)
    if keys.get("algo.kl.use_loss"):
        keys = {"algo.kl.init_coef": 0.01, "algo.kl.estimator": "k1"} | keys
    return keys


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    add_mini_batches(recipe, settings, to_decide, *SIZES)
    if above_0(recipe.get("ds.ring_attn_size")) > 1:
        settings["policy.parallel.context_parallel_method"] = "ring"
    nodes = count(recipe, "actor.num_nodes", 1, to_decide)
    set_data_parallel(
        settings, nodes, count(recipe, "actor.num_gpus_per_node", 8, to_decide)
    )
    if recipe.get("train.async_enable"):
        settings["rollout.placement"] = "apart"
        settings["rollout.max_staleness"] = recipe.get("train.async_queue_size", 1)
    ask_for_steps(recipe.get("train.num_episodes", 1), settings, to_decide)
    _data(recipe, settings, to_decide)
    _lengths(recipe, settings, to_decide)
    _algorithm(recipe, settings)
    ask_for_ratios(settings, to_decide)
    _rewards(recipe, settings, to_decide)


def _data(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    paths = str(recipe.get("data.prompt_dataset", "")).split(",")
    if len(paths) == 1 and paths[0]:
        settings["data.train"] = paths[0]
    elif len(paths) > 1:
        weights = str(recipe.get("data.prompt_probs", "")).split(",")
        are_numbers = all(
            weight.strip().replace(".", "", 1).isdigit() for weight in weights
        )
        if are_numbers and len(weights) == len(paths):
            settings["data.sources"] = dict(zip(paths, map(float, weights), strict=True))
        else:
            settings["data.sources"] = shares_of(paths, to_decide)
    if above_0(recipe.get("data.max_images_per_prompt")) and not recipe.get(
        "actor.freeze_visual_encoder"
    ):
        settings["model.train_vision"] = True


def _lengths(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    """Divide the tokens of prompt and response together."""
    length = count(recipe, "data.max_len", 2048, to_decide)
    if "data.max_prompt_tokens" in settings:  # of an early version, which had both
        return
    settings["rollout.max_model_tokens"] = length
    settings["data.overlong_prompts"] = "truncate"
    response = above_0(settings.get("rollout.sampling.max_new_tokens"))
    if not response:
        response = length - min(1024, length // 2)
        formula = f"data.max_len {length} - {length - response} for the prompt"
        settings.compute("rollout.sampling.max_new_tokens", response, formula)
        to_decide.append(
            f"rollout.sampling.max_new_tokens={response}: the rest of {length} there."
        )
    formula = f"data.max_len {length} - rollout.max_new_tokens {response}"
    settings.compute("data.max_prompt_tokens", max(1, length - response), formula)


def _algorithm(recipe: Recipe, settings: Settings) -> None:
    move_discount(settings, ("reinforce_plus_plus", "reinforce_plus_plus_baseline"))
    for key in ("coefficient", "estimator"):
        if recipe.get("algo.kl.use_loss") and f"algorithm.kl_in_reward.{key}" in settings:
            settings[f"algorithm.loss.kl_{key}"] = settings.pop(
                f"algorithm.kl_in_reward.{key}"
            )
    correction = "algorithm.loss.rollout_correction"
    # Its ratios are to the sampler's log-probs then.
    if settings.get("algorithm.loss.name") == "gspo":
        settings.pop(f"{correction}.weights", None)
    if settings.get(f"{correction}.weights", "none") == "none":
        settings.pop(f"{correction}.rejection", None)
        return
    bounds = recipe.get("algo.advantage.is_correction_threshold", 5.0)
    low, high = bounds if isinstance(bounds, list) and len(bounds) == 2 else (0.5, bounds)
    settings[f"{correction}.cap"] = high
    if settings.get(f"{correction}.rejection", "none") != "none":
        settings[f"{correction}.rejection_low"] = low
        settings[f"{correction}.rejection_high"] = high


def _rewards(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    location = str(recipe.get("reward.remote_url", ""))
    if location.endswith(".py"):
        settings["reward.function"] = f"{location}:reward_func"
        to_decide.append(
            f"reward.function={location}:reward_func: its arguments differ. Adapt it."
        )
    elif location:
        to_decide.append(
            f"reward.function: {location} there. Write a function that asks it."
        )
    if agent := recipe.get("train.agent_func_path"):
        to_decide.append(
            f"rollout.agent: {agent} there. Name an agent or environment of yours."
        )
    names = [name for name in str(settings.get("reward.model.path", "")).split(",") if name]
    if len(names) > 1:
        settings.pop("reward.model.path")
        settings["reward.model.paths"] = {name.rpartition("/")[2]: name for name in names}
    if settings.get("algorithm.advantage") == "gae" and names and not location:
        settings.setdefault("critic.path", names[0])
