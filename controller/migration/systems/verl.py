"""verl: prompts of a step over prompts of a mini-batch, nodes x GPUs over ranks that share a model."""

import math

from controller.migration.rules import Recipe, Settings, ask_for_steps, count, paths_of, shares_of

ACTOR = "actor_rollout_ref.actor."
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
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.total_epochs",
)


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    _files(recipe, settings, to_decide)
    prompts = count(recipe, "data.train_batch_size", 1024, to_decide)
    mini = count(recipe, f"{ACTOR}ppo_mini_batch_size", 256, to_decide)
    settings["batch.prompts_per_step"] = prompts
    settings["batch.mini_batches"] = max(1, round(prompts / mini))
    if prompts % mini:
        to_decide.append(
            f"batch.mini_batches={settings['batch.mini_batches']}: {prompts} prompts are not a multiple of {mini}."
        )
    for role, section in (("policy", f"{ACTOR}fsdp_config"), ("critic", "critic.model.fsdp_config")):
        if recipe.get(f"{section}.param_offload") is True:  # it includes the optimiser's, in either order
            settings[f"{role}.cpu_offload"] = "all"
    _gpus(recipe, settings, to_decide)
    ask_for_steps(recipe.get("trainer.total_epochs", 30), settings, to_decide)
    if settings.get("algorithm.loss.name") in ("gspo", "sapo", "gmpo"):  # they have a default there too
        settings.pop("algorithm.loss.aggregation", None)
    path = recipe.get("*custom_reward_function.path")
    if path:
        name = recipe.get("*custom_reward_function.name") or "compute_score"
        settings["reward.function"] = f"{path}:{name}"
    elif manager := recipe.get("*reward_manager") or recipe.get("*reward_manager.*"):
        to_decide.append(f"reward.function: verl's reward manager {manager} scores by data source. Write a function.")
    if "run.dir" in settings:
        settings["run.dir"] = str(settings["run.dir"]).removesuffix(f"/{settings.get('run.name')}")


def _files(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    train, *others = paths_of(recipe.get("data.train_files"))
    if others:
        settings["data.sources"] = shares_of([train, *others], to_decide)
    elif train:
        settings["data.train"] = train
    held_out, *others = paths_of(recipe.get("data.val_files"))
    if held_out:
        settings["data.validation"] = held_out
    if others:
        to_decide.append(f"data.validation={held_out}: one file here. Join the others: {', '.join(others)}.")


def _gpus(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    nodes = count(recipe, "trainer.nnodes", 1, to_decide)
    of_a_node = count(recipe, "trainer.n_gpus_per_node", 8, to_decide)
    sharing = math.prod(settings.get(f"policy.parallel.{way}_parallel", 1) for way in ("context", "tensor", "pipeline"))
    gpus = nodes * of_a_node
    settings["policy.data_parallel"] = max(1, gpus // sharing)
    settings["rollout.replicas"], settings["rollout.placement"] = 0, "colocated"
    shard = recipe.get(f"{ACTOR}fsdp_config.fsdp_size", -1)
    if isinstance(shard, int) and 0 < shard < gpus:
        settings["policy.parallel.replicate"] = gpus // shard
