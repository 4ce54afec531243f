from pathlib import Path

import pytest

from controller.config import Config, load
from controller.preflight.checks import check
from controller.preflight.describe import describe
from tests.controller.config_workspace import refusal, write_model

PPO = "algorithm.advantage=gae"


@pytest.mark.parametrize(
    "overrides",
    [
        (PPO, "rollout.samples_per_prompt=1"),
        (PPO, "critic.warmup_steps=9", "critic.loss.clip=0", "critic.path=model"),
        (PPO, "batch.mini_batches=1", "critic.loss.aggregation=sequence_mean_token_mean"),
        (PPO, "policy.parallel.context_parallel=2", "critic.max_tokens=48"),
        (PPO, "critic.optimizer.schedule=cosine", "critic.optimizer.total_steps=9"),
        (PPO, "model.lora.rank=8", "model.layout=padded"),
    ],
    ids=" ".join,
)
def test_a_critic_goes_with_these(workspace: Path, overrides: tuple[str, ...]) -> None:
    check(load("config.yaml", overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (PPO, "critic.warmup_steps=10"),
            "critic.warmup_steps=10 leaves the policy no step to learn in",
        ),
        ((PPO, "critic.optimizer.warmup_steps=21"), "critic.optimizer.warmup_steps=21 is more than the 20"),
        (
            (PPO, "critic.warmup_steps=5", "policy.optimizer.warmup_steps=11"),
            "policy.optimizer.warmup_steps=11 is",
        ),
        ((PPO, "critic.max_tokens=95"), "critic.max_tokens=95 is below the longest possible sequence"),
        ((PPO, "critic.forward_max_tokens=95"), "critic.forward_max_tokens=95 is below the longest possible sequence"),
        ((PPO, "algorithm.loss.name=gmpo"), "algorithm.loss.name=gmpo weighs a sequence by one advantage"),
        (
            (PPO, "policy.parallel.tensor_parallel=2"),
            "policy.parallel.tensor_parallel=2 would share the critic",
        ),
        (
            (PPO, "algorithm.groups_without_signal=drop"),
            "algorithm.groups_without_signal=drop with algorithm",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_a_critic_cannot_do_is_refused(workspace: Path, overrides: tuple[str, ...], message: str) -> None:
    assert refusal(*overrides).startswith(message)


def test_what_is_left_at_zero_follows_the_policy(workspace: Path) -> None:
    config = load("config.yaml", [PPO, "critic.warmup_steps=4", "model.lora.rank=8"])
    assert (config.critic_max_tokens, config.critic_forward_max_tokens) == (4096, 4096)
    assert (config.total_optimizer_steps, config.critic_optimizer_steps) == (12, 20)
    assert (config.critic_model.path, config.critic_model.lora.rank) == ("model", 0)
    told = load("config.yaml", [PPO, "critic.max_tokens=5000", "critic.path=other"])
    assert (told.critic_max_tokens, told.critic_forward_max_tokens) == (5000, 5000)
    assert told.critic_model.path == "other"


def test_the_dry_run_shows_the_critic(workspace: Path) -> None:
    page = describe(load("config.yaml", [PPO, "algorithm.loss.kl_coefficient=0.1", "critic.max_tokens=192"]))
    assert "pool training: 2 x {CPU: 0.75}" in page
    assert "critic: 2 actors, 0.25 CPU each, bundle 0..1 of pool training" in page
    assert "critic.max_tokens 192 >= longest possible sequence 96: a micro-batch has room for at least 2 such" in page


def test_training_roles_share_a_gpu_evenly() -> None:
    config = Config()
    config.algorithm.advantage, config.algorithm.loss.kl_coefficient = "gae", 0.1
    assert config.training_roles == ("policy", "reference", "critic")


MODEL = "reward.model.path=judge"
JUDGE = ["Qwen2ForSequenceClassification"]


def test_a_reward_model_stands_beside_a_function_or_alone(workspace: Path) -> None:
    write_model(workspace / "judge", architectures=JUDGE)
    check(load("config.yaml", [MODEL, "reward.model.weight=-0.5", "reward.model.max_tokens=96"]))
    alone = load("config.yaml", [MODEL, "reward.function=''"])
    check(alone)
    assert alone.reward.weights == {}
    assert alone.training_roles == ("policy", "reward_model")
    assert (alone.reward_model.path, alone.reward_model_max_tokens) == ("judge", 4096)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((MODEL, "reward.model.weight=0"), "reward.model.weight=0.0 leaves the model without effect"),
        ((MODEL, "reward.model.max_tokens=95"), "reward.model.max_tokens=95 is below the longest possible sequence"),
        (
            (MODEL, "policy.parallel.tensor_parallel=2"),
            "policy.parallel.tensor_parallel=2 would share the reward model",
        ),
        (("reward.model.path=model",), "reward.model.path=model: its architecture is None."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_a_reward_model_cannot_do_is_refused(workspace: Path, overrides: tuple[str, ...], message: str) -> None:
    write_model(workspace / "judge", architectures=JUDGE)
    assert refusal(*overrides).startswith(message)
