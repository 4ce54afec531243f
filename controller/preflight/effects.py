"""Settings without effect in a combination are refused, not ignored. Those of a loss are in `loss_rules`.

requirement | whether it holds | keys and sections without effect otherwise
"""

from collections.abc import Callable, Sequence
from typing import Any

from controller.config import TrainingConfig
from controller.config.file import settings, value_of
from workers.errors import ConfigError

Row = tuple[str, Callable[[Any], bool], tuple[str, ...]]

OWN_REFERENCE: Row = (
    "a reference of its own (with model.lora.rank above 0 that needs reference.path)",
    lambda c: c.starts_reference or not c.uses_reference,
    ("reference.cpu_offload",),
)
EVERYWHERE: tuple[Row, ...] = (
    (
        "balance.algorithm=karmarkar_karp (the others have an order of their own)",
        lambda c: c.balance.algorithm in ("karmarkar_karp", "load_balance"),
        ("balance.order",),
    ),
    ("balance.algorithm other than none", lambda c: c.balance.algorithm != "none", ("balance.refit",)),
    (
        "policy.parallel.context_parallel above 1",
        lambda c: c.policy.parallel.context_parallel > 1,
        ("policy.parallel.context_parallel_method",),
    ),
    ("several training ranks", lambda c: c.training_workers > 1, ("policy.parallel.defer_gradient_reduction",)),
    (
        "model.share_prefixes=auto or always",
        lambda c: c.model.share_prefixes != "never",
        ("model.min_shared_tokens",),
    ),
    ("model.gradient_checkpointing", lambda c: c.model.gradient_checkpointing, ("model.activation_offload",)),
    ("a local Ray", lambda c: not c.resources.ray_address, ("resources.dashboard",)),
    ("model.lora.rank above 0", lambda c: c.model.lora.rank > 0, ("model.lora.alpha", "model.lora.target_modules")),
    ("data.validation", lambda c: bool(c.data.validation), ("validation.",)),
    ("run.checkpoint_every above 0", lambda c: c.run.checkpoint_every > 0, ("run.keep_checkpoints",)),
    ("run.resume=auto or a path", lambda c: c.run.resume != "never", ("run.other_data",)),
    ("tracking.wandb or tracking.mlflow", lambda c: c.tracking.wandb or c.tracking.mlflow, ("tracking.project",)),
    (
        "engines on GPUs (vLLM's on CPUs do not say which experts a token went through)",
        lambda c: c.uses_gpus and hasattr(c, "rollout"),
        ("model.router_replay",),
    ),
    (
        "GPUs",
        lambda c: c.uses_gpus,
        (
            "model.activation_offload",
            "model.compile",
            "policy.cpu_offload",
            "reference.cpu_offload",
            "critic.cpu_offload",
            "reward.model.cpu_offload",
            "rollout.memory_fraction",
            "rollout.enforce_eager",
        ),
    ),
)
"""Rows of every command: (requirement in words, whether it holds, keys or sections without effect otherwise)."""

NO_EFFECT_WITHOUT: tuple[Row, ...] = (
    (
        "batch.mini_batches, batch.epochs above 1 or rollout.max_staleness above 0 (the only update of a step starts "
        "where the samples came from: all ratios are 1)",
        lambda c: c.updates_per_step > 1 or c.old_log_probs == "sampler",
        ("algorithm.loss.clip_low", "algorithm.loss.clip_high", "algorithm.loss.dual_clip", "algorithm.loss.sapo_tau_"),
    ),
    (
        "batch.mini_batches or batch.epochs above 1 (the only update of a step starts at the old values)",
        lambda c: c.updates_per_step > 1,
        ("critic.loss.clip",),
    ),
    (
        "batch.mini_batches or batch.epochs above 1 (and no ratios to the sampler's log-probs)",
        lambda c: c.has_forward_pass,
        ("policy.forward_max_tokens", "policy.forward_max_sequences"),
    ),
    (
        "a forward-only pass: batch.mini_batches or batch.epochs above 1, a KL, a critic or a reward model",
        lambda c: c.has_forward_pass or c.uses_reference or c.uses_critic or c.uses_reward_model,
        ("policy.forward_min_micro_batches", "model.forward_layout", "model.forward_length_multiple"),
    ),
    ("batch.mini_batches above 1", lambda c: c.batch.mini_batches > 1, ("batch.mini_batches_by",)),
    ("algorithm.advantage=grpo", lambda c: c.algorithm.advantage == "grpo", ("algorithm.normalize_by_std",)),
    (
        "algorithm.advantage=reinforce_plus_plus or reinforce_plus_plus_baseline (with gae it is algorithm.gae.gamma)",
        lambda c: c.algorithm.advantage.startswith("reinforce_plus_plus"),
        ("algorithm.gamma",),
    ),
    ("algorithm.advantage=pass_at_k", lambda c: c.algorithm.advantage == "pass_at_k", ("algorithm.pass_k",)),
    (
        "algorithm.loss.rollout_correction.weights=token or sequence",
        lambda c: c.algorithm.loss.rollout_correction.weights != "none",
        ("algorithm.loss.rollout_correction.cap",),
    ),
    (
        "algorithm.loss.rollout_correction.rejection=token or sequence",
        lambda c: c.algorithm.loss.rollout_correction.rejection != "none",
        ("algorithm.loss.rollout_correction.rejection_",),
    ),
    (
        "rollout.max_staleness above 0",
        lambda c: c.rollout.max_staleness > 0,
        ("rollout.staleness_window", "rollout.kv_cache_after_update"),
    ),
    ("engines on CPUs", lambda c: not c.uses_gpus, ("rollout.cpu_kv_cache_gib", "rollout.threads")),
    (
        "algorithm.loss.kl_coefficient above 0",
        lambda c: c.algorithm.loss.kl_coefficient > 0,
        ("algorithm.loss.kl_estimator", "algorithm.loss.kl_correction"),
    ),
    (
        "algorithm.loss.kl_coefficient above 0 or algorithm.kl_in_reward.coefficient above 0",
        lambda c: c.uses_reference,
        ("reference.",),
    ),
    ("reward.model.path", lambda c: c.uses_reward_model, ("reward.model.",)),
    (
        "algorithm.kl_in_reward.coefficient above 0",
        lambda c: c.algorithm.kl_in_reward.coefficient > 0,
        ("algorithm.kl_in_reward.",),
    ),
    (
        "algorithm.kl_in_reward.target above 0",
        lambda c: c.algorithm.kl_in_reward.target > 0,
        ("algorithm.kl_in_reward.horizon",),
    ),
    ("algorithm.advantage=gae", lambda c: c.uses_critic, ("algorithm.gae.", "critic.")),
    *(
        (
            f"{role}.optimizer.schedule=linear or cosine",
            lambda c, role=role: getattr(c, role).optimizer.schedule != "constant",
            (f"{role}.optimizer.total_steps", f"{role}.optimizer.final_learning_rate_ratio"),
        )
        for role in ("policy", "critic")
    ),
    OWN_REFERENCE,
    ("rollout.environment", lambda c: bool(c.rollout.environment), ("rollout.max_turns", "rollout.max_episode_tokens")),
    (
        "algorithm.groups_without_signal=replace",
        lambda c: c.algorithm.groups_without_signal == "replace",
        ("algorithm.max_sampling_rounds",),
    ),
    ("reward.overlong_tokens above 0", lambda c: c.reward.overlong_tokens > 0, ("reward.overlong_penalty",)),
    ("validation.samples above 1", lambda c: c.validation.samples > 1, ("validation.success",)),
    ("data.curriculum left empty (it orders every epoch itself)", lambda c: not c.data.curriculum, ("data.shuffle",)),
    *EVERYWHERE,
)
"""Rows of reinforcement learning."""


def check_settings_have_effect(config: TrainingConfig, rows: Sequence[Row] = NO_EFFECT_WITHOUT) -> None:
    """Raise ConfigError at the first setting that differs from its default and does nothing in this combination."""
    for needed, is_there, prefixes in rows:
        if is_there(config):
            continue
        for found in settings(type(config)()):
            value = value_of(config, found.key)
            if found.key.startswith(prefixes) and value != found.default and not found.follows:
                raise ConfigError(
                    f"{found.key}={value} has no effect without {needed}; set that, or remove {found.key}."
                )
