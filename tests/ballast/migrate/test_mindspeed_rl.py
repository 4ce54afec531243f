"""MindSpeed-RL's recipes keep their batch, ranks and loss."""

from typing import Any

import pytest

from ballast.migrate.translation import migrate
from tests.benchmarks.migrations import EQUAL, compare_batch
from workers.errors import ConfigError

RECIPE = {
    "megatron_training.global_batch_size": 32,
    "megatron_training.train_iters": 500,
    "megatron_training.data_path": "train.jsonl",
    "megatron_training.tokenizer_name_or_path": "m",
    "megatron_training.use_flash_attn": True,
    "actor_config.tensor_model_parallel_size": 2,
    "actor_config.pipeline_model_parallel_size": 2,
    "actor_config.lr": 2e-6,
    "rl_config.adv_estimator": "group_norm",
    "rl_config.kl_penalty": "low_var_kl",
    "rl_config.init_kl_coef": 0.001,
    "rl_config.mini_batch_size": 16,
    "rl_config.n_samples_per_prompt": 4,
    "rl_config.actor_resource.num_npus": 16,
    "generate_config.sampling_config.max_tokens": 512,
}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, {"batch.prompts_per_step": 32, "batch.mini_batches": 2}),
        ({"rl_config.mini_batch_size": 8}, {"batch.mini_batches": 4}),
        ({"rl_config.filter_groups_train_batch_size": 16}, {"batch.prompts_per_step": 16}),
        ({"rl_config.epochs": 2}, {"batch.epochs": 2, "batch.mini_batches": 2}),
        ({"rl_config.actor_resource.num_npus": 8}, {"policy.data_parallel": 2}),
    ],
)
def test_sizes_of_mindspeed_rl_follow_their_keys(
    changes: dict[str, Any], wanted: dict[str, Any]
) -> None:
    source = RECIPE | changes
    migration = migrate(source)
    assert migration.system == "MindSpeed-RL"
    assert not migration.unknown
    defaults = {key: migration.command.known[key].default for key in wanted}
    assert {key: migration.settings.get(key, defaults[key]) for key in wanted} == wanted
    assert compare_batch(source, migration) == EQUAL


def test_a_mini_batch_is_one_prompt_where_none_is_given() -> None:
    source = {key: value for key, value in RECIPE.items() if "mini_batch" not in key}
    migration = migrate(source)
    assert migration.settings["batch.mini_batches"] == 32
    assert compare_batch(source, migration) == EQUAL


def test_a_penalty_in_the_reward_is_moved_there() -> None:
    settings = migrate(RECIPE | {"rl_config.use_kl_in_reward": True}).settings
    assert settings["algorithm.kl_in_reward.coefficient"] == 0.001
    assert settings["algorithm.kl_in_reward.estimator"] == "k3"
    assert "algorithm.loss.kl_coefficient" not in settings


def test_the_loss_of_mindspeed_rl_is_kept() -> None:
    settings = migrate(RECIPE).settings
    assert settings["algorithm.loss.kl_coefficient"] == 0.001
    assert settings["policy.optimizer.learning_rate"] == 2e-6
    assert settings["policy.data_parallel"] == 4
    assert settings["rollout.sampling.max_new_tokens"] == 512


@pytest.mark.parametrize("stage", ["dpo", "ray_ppo"])
def test_stages_that_are_not_translated_are_refused(stage: str) -> None:
    with pytest.raises(ConfigError, match=f"stage={stage}"):
        migrate(RECIPE | {"megatron_training.stage": stage})
