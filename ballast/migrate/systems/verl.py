"""verl: prompts of a step over prompts of a mini-batch, nodes x GPUs over ranks that share a model."""

from collections.abc import Mapping
from typing import Any

from ballast.migrate.rules import (
    TOOLS,
    Recipe,
    Settings,
    ask_for_critics_size,
    ask_for_steps,
    count,
    decay_all,
    is_on,
    move_discount,
    name_episodes,
    paths_of,
    set_data_parallel,
    set_validation,
    shares_of,
    steps_to_updates,
)
from ballast.migrate.systems.verl_distillation import ENABLED, derive_distillation
from ballast.migrate.systems.verl_distillation import KEYS as KEYS_OF_DISTILLATION

GROUPS = ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")
OF_A_CRITIC = ("sequence_mean_token_mean", "sequence_mean_token_sum")
ACTOR = "actor_rollout_ref.actor."
LORA_OF_MEGATRON = "actor_rollout_ref.model.lora."
KL = "algorithm.kl_ctrl."
OF_ADAPTIVE = (f"{KL}target_kl", f"{KL}horizon")
TURNS = "actor_rollout_ref.rollout.multi_turn."
TOOLS_OF = (f"{TURNS}tool_config_path", "data.tool_config_path")
AGENT_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
OF_IMAGES = frozenset({"data.image_key", "data.video_key", f"{ACTOR}freeze_vision_tower"})
REJECTION = "algorithm.rollout_correction.rollout_rs_threshold"
KEYS = (
    "data.train_files",
    "data.val_files",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_mini_batch_size",
    "critic.ppo_micro_batch_size",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size",
    "critic.forward_micro_batch_size_per_gpu",
    "*custom_reward_function.path",
    "*custom_reward_function.name",
    "*reward_manager",
    "*reward_manager.*",
    f"{TURNS}enable",
    *TOOLS_OF,
    REJECTION,
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.total_epochs",
    *KEYS_OF_DISTILLATION,
)


def prepare(recipe: Recipe, to_decide: list[str]) -> Mapping[str, Any]:
    """Drop the target of a fixed coefficient and a teacher that is switched off.

    Adds what is left to defaults: alpha of Megatron's adapters, turns.
    """
    off = () if recipe.get(f"{KL}type") == "adaptive" else OF_ADAPTIVE
    if not is_on(recipe, ENABLED):
        off = (*off, "distillation.")
    counting = {key: value for key, value in recipe.items() if not key.startswith(off)}
    # Read there where a record has images.
    for key in OF_IMAGES & getattr(recipe, "defaults", frozenset()):
        del counting[key]
    if f"{LORA_OF_MEGATRON}rank" in recipe:
        counting.setdefault(f"{LORA_OF_MEGATRON}alpha", 32)
    if any(recipe.get(key) for key in TOOLS_OF) or recipe.get(AGENT_LOOP) == "tool_agent":
        counting.setdefault(f"{TURNS}enable", True)
    return counting


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    _files(recipe, settings, to_decide)
    prompts = count(recipe, "data.train_batch_size", 1024, to_decide)
    mini = count(recipe, f"{ACTOR}ppo_mini_batch_size", 256, to_decide)
    settings["batch.prompts_per_step"] = prompts
    formula = f"data.train_batch_size {prompts} / ppo_mini_batch_size {mini}"
    settings.compute("batch.mini_batches", max(1, round(prompts / mini)), formula)
    if prompts % mini:
        to_decide.append(
            f"batch.mini_batches={settings['batch.mini_batches']}: {prompts} prompts are not a multiple of "
            f"{mini}."
        )
    for role, section in (
        ("policy", f"{ACTOR}fsdp_config"),
        ("critic", "critic.model.fsdp_config"),
    ):
        # It includes the optimiser's, in either order.
        if recipe.get(f"{section}.param_offload") is True:
            settings[f"{role}.cpu_offload"] = "all"
    _gpus(recipe, settings, to_decide)
    _optimizers(recipe, settings)
    derive_distillation(recipe, settings, to_decide)
    _algorithm(recipe, settings, to_decide)
    _turns(recipe, settings, to_decide)
    ask_for_critics_size(
        mini, recipe.get("critic.ppo_mini_batch_size", mini), settings, to_decide
    )
    ask_for_steps(recipe.get("trainer.total_epochs", 30), settings, to_decide)
    is_frozen = recipe.get(f"{ACTOR}freeze_vision_tower") is True or settings.get(
        "model.lora.rank"
    )
    if "data.image_key" in settings and not is_frozen:
        settings["model.train_vision"] = True
    path = recipe.get("*custom_reward_function.path")
    if path:
        name = recipe.get("*custom_reward_function.name") or "compute_score"
        settings["reward.function"] = f"{path}:{name}"
    elif manager := recipe.get("*reward_manager") or recipe.get("*reward_manager.*"):
        to_decide.append(
            f"reward.function: verl's reward manager {manager} scores by data source. Write a function."
        )
    if "run.dir" in settings:
        settings["run.dir"] = str(settings["run.dir"]).removesuffix(
            f"/{settings.get('run.name')}"
        )


def _files(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    train, *other_paths = paths_of(recipe.get("data.train_files"))
    if other_paths:
        settings["data.sources"] = shares_of([train, *other_paths], to_decide)
    elif train:
        settings["data.train"] = train
    set_validation(paths_of(recipe.get("data.val_files")), settings, to_decide)


def _gpus(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    nodes = count(recipe, "trainer.nnodes", 1, to_decide)
    of_a_node = count(recipe, "trainer.n_gpus_per_node", 8, to_decide)
    set_data_parallel(
        settings, nodes, of_a_node, recipe.get(f"{ACTOR}fsdp_config.fsdp_size")
    )
    settings["rollout.replicas"], settings["rollout.placement"] = 0, "colocated"


def _optimizers(recipe: Recipe, settings: Settings) -> None:
    """A schedule there counts steps of the trainer. Only Megatron's optimiser leaves out vectors."""
    roles = ("policy", "critic")
    steps_to_updates(
        settings,
        *(
            f"{role}.optimizer.{name}_steps"
            for role in roles
            for name in ("warmup", "total")
        ),
    )
    of_megatron = "megatron" if any(".megatron." in key for key in recipe) else "fsdp"
    if recipe.get("*.strategy", of_megatron) != "megatron":
        decay_all(settings)


def _algorithm(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    move_discount(settings)
    if (
        settings.get("rollout.samples_per_prompt") == 1
        and settings.get("algorithm.advantage") in GROUPS
    ):
        to_decide.append(
            "rollout.samples_per_prompt: 1 there, and the estimator compares samples. Set 2 or more."
        )
    aggregation = settings.get("algorithm.loss.aggregation")
    if settings.get("algorithm.advantage") == "gae" and aggregation in OF_A_CRITIC:
        settings.setdefault("critic.loss.aggregation", aggregation)
    if aggregation == "sequence_mean_token_sum_norm":
        settings.setdefault(
            "algorithm.loss.constant_length",
            settings.get("rollout.sampling.max_new_tokens", 512),
        )
    # They have a default there too.
    if settings.get("algorithm.loss.name") in ("gspo", "sapo", "gmpo"):
        settings.pop("algorithm.loss.aggregation", None)
    _rejection(recipe.get(REJECTION), settings, to_decide)


def _rejection(bounds: Any, settings: Settings, to_decide: list[str]) -> None:
    """`LOW_HIGH` bounds the inverse ratio there, `HIGH` stands for 1 / HIGH and HIGH."""
    section = "algorithm.loss.rollout_correction"
    if settings.get(f"{section}.rejection", "none") == "none":
        return
    low, _, high = str(bounds).rpartition("_")
    try:
        settings.compute(
            f"{section}.rejection_low", 1 / float(high), f"1 / {high} of {REJECTION}"
        )
        upper = 1 / float(low) if low else float(high)
        settings.compute(
            f"{section}.rejection_high",
            upper,
            f"{'1 / ' * bool(low)}{low or high} of {REJECTION}",
        )
    except (ValueError, ZeroDivisionError):
        to_decide.append(
            f"{section}.rejection_low: {REJECTION}={bounds} is not LOW_HIGH. Set the bounds."
        )


def _turns(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    """With turns, the length of a response bounds all turns and tools' answers together."""
    if recipe.get(f"{TURNS}enable") is not True:
        return
    name_episodes("rollout.tools", TOOLS, settings, to_decide)
    length = settings.get("rollout.sampling.max_new_tokens", 512)
    formula = f"data.max_response_length {length}, of all turns there"
    settings.compute("rollout.max_episode_tokens", length, formula)
    if "rollout.max_turns" not in settings:
        to_decide.append(
            "rollout.max_turns: there a response's length alone limits them. Set your limit."
        )
