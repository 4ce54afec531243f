"""SkyRL: prompts of a step over prompts of a mini-batch, and keys that count only with the value
of another.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ballast.migrate.rules import (
    ENVIRONMENT,
    Recipe,
    Settings,
    above_0,
    add_mini_batches,
    ask_for_critics_size,
    ask_for_steps,
    count,
    decay_all,
    move_discount,
    name_episodes,
    set_data_parallel,
)

ALGORITHM = "trainer.algorithm."
CORRECTION = f"{ALGORITHM}off_policy_correction."
EVALUATION = "generator.eval_sampling_params."
CLIPPED = (None, "regular", "dual_clip", "gspo", "clip_cov")
ONLY_WITH = (
    (f"{ALGORITHM}eps_clip_*", f"{ALGORITHM}policy_loss_type", CLIPPED),
    (f"{ALGORITHM}clip_ratio_c", f"{ALGORITHM}policy_loss_type", ("dual_clip",)),
    (f"{ALGORITHM}cispo.*", f"{ALGORITHM}policy_loss_type", ("cispo",)),
    (f"{ALGORITHM}sapo.*", f"{ALGORITHM}policy_loss_type", ("sapo",)),
    (f"{ALGORITHM}clip_cov.*", f"{ALGORITHM}policy_loss_type", ("clip_cov",)),
    (f"{ALGORITHM}kl_cov.*", f"{ALGORITHM}policy_loss_type", ("kl_cov",)),
    (f"{ALGORITHM}entropy_loss_coef", f"{ALGORITHM}use_entropy_loss", (True,)),
    (f"{ALGORITHM}max_seq_len", f"{ALGORITHM}loss_reduction", ("seq_mean_token_sum_norm",)),
    (f"{ALGORITHM}kl_ctrl.*", f"{ALGORITHM}use_kl_in_reward", (True,)),
    (f"{ALGORITHM}kl_ctrl.kl_target", f"{ALGORITHM}kl_ctrl.type", ("adaptive",)),
    (f"{ALGORITHM}tis_imp_ratio_cap", f"{ALGORITHM}use_tis", (True,)),
    (f"{CORRECTION}token_tis_ratio_clip_high", f"{CORRECTION}tis_ratio_type", ("token",)),
    (
        f"{CORRECTION}sequence_tis_ratio_clip_high",
        f"{CORRECTION}tis_ratio_type",
        ("sequence",),
    ),
    (f"{CORRECTION}geo_mask_*", f"{CORRECTION}sequence_mask_metric", ("geometric",)),
    (f"{CORRECTION}product_mask_*", f"{CORRECTION}sequence_mask_metric", ("product",)),
    ("trainer.fully_async.max_staleness_steps", "trainer.fully_async.enabled", (True,)),
)
"""Keys, the key that switches them on, and its values that do."""
SIZES = ("trainer.policy_mini_batch_size", "trainer.train_batch_size", "")
NODES = "trainer.placement.policy_num_nodes"
GPUS_OF_A_NODE = "trainer.placement.policy_num_gpus_per_node"
SHARD = "trainer.policy.fsdp_config.fsdp_size"
KEYS = (
    SIZES[0],
    "trainer.critic_mini_batch_size",
    NODES,
    GPUS_OF_A_NODE,
    SHARD,
    "trainer.epochs",
)


def prepare(recipe: Recipe, to_decide: list[str]) -> Mapping[str, Any]:
    to_decide += _tasks_by_name(recipe)
    counting = {key: value for key, value in recipe.items() if _counts(key, recipe)}
    if any(key.startswith(EVALUATION) for key in recipe):
        counting.setdefault(f"{EVALUATION}temperature", 1.0)
    return counting


def _counts(key: str, recipe: Recipe) -> bool:
    return all(
        recipe.get(switch) in values
        for pattern, switch, values in ONLY_WITH
        if fnmatchcase(key, pattern)
    )


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    add_mini_batches(recipe, settings, to_decide, *SIZES)
    ask_for_critics_size(
        recipe.get(SIZES[0]),
        recipe.get("trainer.critic_mini_batch_size"),
        settings,
        to_decide,
    )
    nodes = count(recipe, NODES, 1, to_decide)
    of_a_node = count(recipe, GPUS_OF_A_NODE, 1, to_decide)
    set_data_parallel(settings, nodes, of_a_node, recipe.get(SHARD))
    if recipe.get("trainer.strategy") != "megatron":
        decay_all(settings)
    _algorithm(recipe, settings)
    if recipe.get("trainer.fully_async.enabled") is True:
        settings.setdefault("rollout.max_staleness", 4)
    if above_0(recipe.get("generator.max_turns")) > 1:
        name_episodes("rollout.environment", ENVIRONMENT, settings, to_decide)
    ask_for_steps(recipe.get("trainer.epochs", 1), settings, to_decide)


def _tasks_by_name(recipe: Mapping[str, Any]) -> list[str]:
    """Say where its environments of other projects go."""
    lines = []
    if recipe.get("environment.env_class") == "openenv":
        lines.append(
            "rollout.environment=openenv:URL: name the environment's server, and "
            "data.train=openenv:URL?file=... (docs/openenv.md)."
        )
    if any(key.startswith("harbor_trial_config.") for key in recipe):
        lines.append(
            "rollout.environment=harbor:FOLDER: name the folder of tasks, in data.train too, and "
            "rollout.sandbox.kind (docs/tasks.md)."
        )
    return lines


def _algorithm(recipe: Recipe, settings: Settings) -> None:
    move_discount(settings)
    if settings.get("algorithm.advantage") == "gae":
        settings["critic.loss.aggregation"] = "sequence_mean_token_mean"
    if recipe.get(f"{ALGORITHM}use_kl_in_reward") is True:
        settings["algorithm.kl_in_reward.coefficient"] = recipe.get(
            f"{ALGORITHM}kl_loss_coef"
        )
        settings["algorithm.kl_in_reward.estimator"] = settings.pop(
            "algorithm.loss.kl_estimator", "k3"
        )
    if recipe.get(f"{ALGORITHM}use_entropy_loss") is True:
        settings.setdefault("algorithm.loss.entropy_coefficient", 0.01)
    if f"{CORRECTION}token_mask_is_threshold_low" in recipe:
        settings.setdefault("algorithm.loss.rollout_correction.rejection", "token")
