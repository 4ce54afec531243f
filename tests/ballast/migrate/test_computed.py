"""What is computed from several values is listed with its formula, and follows each of its sources."""

from typing import Any

import pytest

from ballast.migrate.reading import Recipe
from ballast.migrate.translation import Migration, migrate
from tests.ballast.migrate.test_counts import BASES

VERL = BASES["verl"] | {
    "data.train_batch_size": 256,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": 5,
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": 4,
    "trainer.nnodes": 2,
    "trainer.n_gpus_per_node": 8,
}
TRL = BASES["TRL"] | {
    "gradient_accumulation_steps": 4,
    "max_steps": 96,
    "num_processes": 2,
    "save_steps": 32,
    "steps_per_generation": 8,
}
SLIME = BASES["slime"] | {
    "rollout-max-context-len": 4096,
    "rollout-max-response-len": 1024,
    "lr": 1e-5,
    "min-lr": 1e-6,
}
OPENRLHF = BASES["OpenRLHF"] | {
    "data.max_len": 4096,
    "rollout.max_new_tokens": 1024,
    "actor.num_nodes": 2,
    "actor.num_gpus_per_node": 4,
}
NEMO_RL = BASES["NeMo-RL"] | {
    "cluster.num_nodes": 2,
    "cluster.gpus_per_node": 4,
    "policy.megatron_cfg.enabled": False,
    "policy.scheduler": [
        {"name": "LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 10}}
    ],
}
PRIME_RL = BASES["prime-rl"] | {
    "orchestrator.batch_size": 256,
    "trainer.scheduler.type": "linear",
    "trainer.scheduler.decay_steps": 20,
    "max_steps": 100,
}
ROLL = {
    "rollout_batch_size": 64,
    "num_return_sequences_in_group": 8,
    "actor_train.training_args.per_device_train_batch_size": 2,
    "actor_train.training_args.gradient_accumulation_steps": 8,
    "actor_train.device_mapping": "list(range(0,8))",
    "dual_clip_loss": True,
    "pg_clip": 0.2,
}
SFT = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "num_processes": 2,
}
MINI_BATCHES = "batch.mini_batches"
GPUS = "policy.data_parallel"


@pytest.mark.drawn(12)
@pytest.mark.parametrize(
    ("recipe", "source", "value", "setting"),
    [
        (VERL, "data.train_batch_size", 512, MINI_BATCHES),
        (VERL, "actor_rollout_ref.actor.ppo_mini_batch_size", 32, MINI_BATCHES),
        (VERL, "data.train_batch_size", 512, "policy.optimizer.warmup_steps"),
        (
            VERL,
            "actor_rollout_ref.actor.optim.lr_warmup_steps",
            7,
            "policy.optimizer.warmup_steps",
        ),
        (VERL, "trainer.nnodes", 3, GPUS),
        (VERL, "trainer.n_gpus_per_node", 4, GPUS),
        (
            VERL,
            "actor_rollout_ref.actor.fsdp_config.fsdp_size",
            8,
            "policy.parallel.replicate",
        ),
        (TRL, "per_device_train_batch_size", 16, "batch.prompts_per_step"),
        (TRL, "steps_per_generation", 16, "batch.prompts_per_step"),
        (TRL, "num_generations", 8, "batch.prompts_per_step"),
        (TRL, "num_processes", 4, "batch.prompts_per_step"),
        (TRL, "gradient_accumulation_steps", 2, MINI_BATCHES),
        (TRL, "max_steps", 48, "run.steps"),
        (TRL, "save_steps", 64, "run.checkpoint_every"),
        (SLIME, "global-batch-size", 32, MINI_BATCHES),
        (SLIME, "n-samples-per-prompt", 16, MINI_BATCHES),
        (SLIME, "rollout-max-context-len", 8192, "data.max_prompt_tokens"),
        (SLIME, "min-lr", 2e-6, "policy.optimizer.final_learning_rate_ratio"),
        (OPENRLHF, "rollout.batch_size", 32, MINI_BATCHES),
        (OPENRLHF, "data.max_len", 8192, "data.max_prompt_tokens"),
        (OPENRLHF, "rollout.max_new_tokens", 2048, "data.max_prompt_tokens"),
        (OPENRLHF, "actor.num_nodes", 4, GPUS),
        (NEMO_RL, "grpo.num_prompts_per_step", 32, MINI_BATCHES),
        (NEMO_RL, "grpo.num_prompts_per_step", 32, "policy.optimizer.warmup_steps"),
        (NEMO_RL, "cluster.num_nodes", 4, GPUS),
        (PRIME_RL, "orchestrator.batch_size", 512, "batch.prompts_per_step"),
        (PRIME_RL, "orchestrator.group_size", 16, "batch.prompts_per_step"),
        (PRIME_RL, "max_steps", 200, "policy.optimizer.decay_ratio"),
        (ROLL, "rollout_batch_size", 128, MINI_BATCHES),
        (ROLL, "actor_train.training_args.gradient_accumulation_steps", 4, MINI_BATCHES),
        (ROLL, "actor_train.device_mapping", "list(range(0,4))", GPUS),
        (ROLL, "pg_clip", 0.3, "algorithm.loss.dual_clip"),
        (SFT, "per_device_train_batch_size", 16, "batch.sequences_per_step"),
        (SFT, "gradient_accumulation_steps", 2, "batch.sequences_per_step"),
    ],
)
def test_a_computed_setting_follows_its_source(
    recipe: dict[str, Any], source: str, value: Any, setting: str
) -> None:
    program = "SFTConfig" if recipe is SFT else "GRPOConfig" if recipe is TRL else ""
    before = migrate(Recipe(recipe, program))
    after = migrate(Recipe(recipe | {source: value}, program))
    assert after.settings[setting] != before.settings[setting]
    assert _line(before, setting) != _line(after, setting)
    assert f"#   {_line(after, setting)}" in after.yaml
    assert "no formula" not in _line(after, setting)


def _line(migration: Migration, setting: str) -> str:
    return next(
        line
        for line in migration.computed
        if line.startswith(f"{setting}={migration.settings[setting]}:")
    )


def test_a_copied_setting_is_not_listed() -> None:
    computed = [line.partition("=")[0] for line in migrate(VERL).computed]
    assert not {"batch.prompts_per_step", "model.path"}.intersection(computed)
