"""Every count of steps of every system comes out in the unit of our setting: a table says the unit there."""

from typing import Any

import pytest

from ballast.migrate import translation
from ballast.migrate.reading import Recipe
from controller.config.aliases import counterparts

OURS = {
    "policy.optimizer.warmup_steps": "update",
    "policy.optimizer.total_steps": "update",
    "critic.optimizer.warmup_steps": "update",
    "critic.optimizer.total_steps": "update",
    "critic.warmup_steps": "step",
    "validation.every": "step",
    "run.checkpoint_every": "step",
    "run.save_every": "step",
    "run.steps": "step",
}
VERL = "actor_rollout_ref."
BASES: dict[str, dict[str, Any]] = {
    "verl": {
        f"{VERL}model.path": "m",
        "data.train_batch_size": 64,
        f"{VERL}actor.ppo_mini_batch_size": 16,
        "algorithm.adv_estimator": "gae",
    },
    "ROLL": {
        "pretrain": "m",
        "rollout_batch_size": 64,
        "num_return_sequences_in_group": 8,
        "actor_train.training_args.per_device_train_batch_size": 4,
        "actor_train.training_args.gradient_accumulation_steps": 16,
        "actor_train.device_mapping": "list(range(0,2))",
    },
    "OpenRLHF": {
        "actor.model_name_or_path": "m",
        "rollout.batch_size": 64,
        "rollout.n_samples_per_prompt": 8,
        "train.batch_size": 128,
    },
    "TRL": {
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "steps_per_generation": 4,
    },
    "slime": {
        "hf-checkpoint": "m",
        "rollout-batch-size": 64,
        "n-samples-per-prompt": 8,
        "global-batch-size": 128,
    },
    "NeMo-RL": {
        "policy.model_name": "m",
        "grpo.num_prompts_per_step": 64,
        "grpo.num_generations_per_prompt": 8,
        "policy.train_global_batch_size": 128,
        "policy.megatron_cfg.enabled": True,
    },
    "SkyRL": {
        "trainer.policy.model.path": "m",
        "trainer.train_batch_size": 64,
        "trainer.policy_mini_batch_size": 16,
        "trainer.algorithm.advantage_estimator": "gae",
    },
    "AReaL": {
        "actor.path": "m",
        "actor.ppo_n_minibatches": 4,
        "train_dataset.batch_size": 64,
        "gconfig.n_samples": 8,
    },
    "prime-rl": {
        "model.name": "m",
        "orchestrator.batch_size": 64,
        "orchestrator.group_size": 8,
        "trainer.scheduler.type": "cosine",
    },
}
UNITS = {
    "verl": {
        "actor.optim.lr_warmup_steps": "step",
        "actor.optim.total_training_steps": "step",
        "actor.optim.lr_decay_steps": "step",
        "critic.optim.lr_warmup_steps": "step",
        "critic.optim.lr_decay_steps": "step",
        "critic.optim.total_training_steps": "step",
        "trainer.critic_warmup": "step",
        "trainer.total_training_steps": "step",
        "trainer.save_freq": "step",
        "trainer.test_freq": "step",
        "trainer.total_epochs": "epoch",
    },
    "ROLL": {
        "max_steps": "step",
        "save_steps": "step",
        "eval_steps": "step",
        "actor_train.training_args.warmup_steps": "update",
    },
    "OpenRLHF": {
        "critic.freezing_steps": "step",
        "eval.steps": "step",
        "ckpt.save_steps": "step",
    },
    "TRL": {
        "max_steps": "update",
        "warmup_steps": "update",
        "eval_steps": "update",
        "save_steps": "update",
        "num_train_epochs": "epoch",
        "total_episodes": "episode",
        "save_strategy": "name",
        "save_only_model": "name",
        "eval_strategy": "name",
    },
    "slime": {
        "lr-decay-iters": "update",
        "lr-warmup-iters": "update",
        "critic-lr-warmup-iters": "update",
        "num-critic-only-steps": "step",
        "num-rollout": "step",
        "eval-interval": "step",
        "save-interval": "step",
    },
    "NeMo-RL": {
        "grpo.max_num_steps": "step",
        "grpo.val_period": "step",
        "checkpointing.save_period": "step",
        "policy.megatron_cfg.scheduler.lr_decay_iters": "step",
        "policy.megatron_cfg.scheduler.lr_warmup_iters": "step",
        "grpo.max_num_epochs": "epoch",
    },
    "SkyRL": {
        "trainer.policy.optimizer_config.num_warmup_steps": "update",
        "trainer.critic.optimizer_config.num_warmup_steps": "update",
        "trainer.max_training_steps": "step",
        "trainer.eval_interval": "step",
        "trainer.ckpt_interval": "step",
        "trainer.hf_save_interval": "step",
        "trainer.epochs": "epoch",
    },
    "AReaL": {"total_train_steps": "step", "total_train_epochs": "epoch"},
    "prime-rl": {
        "trainer.scheduler.warmup_steps": "update",
        "orchestrator.eval.interval": "step",
        "max_steps": "step",
        "eval.interval": "step",
        "val.interval": "step",
        "ckpt.interval": "step",
    },
}
"""Of each key, read in its own system. An update is an optimiser step."""
ROWS = [
    row for row in counterparts() if row.system in BASES and OURS.keys() & set(row.here)
]


def unit_of(system: str, key: str) -> str:
    units = UNITS[system]
    return units.get(key) or units[key.removeprefix("actor_rollout_ref.")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.system}-{row.key}")
def test_counts_of_steps_come_out_in_our_unit(
    row: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Validation has no data here.
    monkeypatch.setattr(translation, "_settle", lambda migration: None)
    unit = unit_of(row.system, row.key)
    if unit == "name":
        return
    migration = translation.migrate(Recipe(BASES[row.system] | {row.key: 40}))
    assert migration.system == row.system
    updates = migration.settings.get("batch.mini_batches", 1) * migration.settings.get(
        "batch.epochs", 1
    )
    assert updates == {"prime-rl": 1}.get(row.system, 4)
    setting = row.here[0]
    if unit in ("epoch", "episode"):
        assert any(line.startswith(setting) for line in migration.open)
        return
    wanted = {("step", "update"): 40 * updates, ("update", "step"): 40 // updates}.get(
        (unit, OURS[setting]), 40
    )
    assert migration.settings[setting] == wanted
