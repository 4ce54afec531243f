"""The KL in the reward: its weight, what it does to advantages, and where it is refused."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from controller.algorithm.advantages import adapted_kl_weight, rloo
from controller.checkpoints.progress import Progress
from controller.config import Config, load
from controller.preflight.checks import check
from controller.step import with_advantages
from workers.batch.remote_batch import RemoteBatch
from workers.config.roles import KlInRewardConfig

ON = "algorithm.kl_in_reward.coefficient=0.1"


def test_the_weight_follows_the_kl_by_hand() -> None:
    settings = KlInRewardConfig(coefficient=0.1, target=6.0, horizon=1000)
    # A tenth too high, half the horizon.
    assert adapted_kl_weight(0.1, 6.6, 500, settings) == pytest.approx(
        0.1 * (1 + 0.1 * 0.5)
    )
    assert adapted_kl_weight(0.1, 60.0, 500, settings) == pytest.approx(
        0.1 * (1 + 0.2 * 0.5)
    )
    assert adapted_kl_weight(0.1, -1.0, 500, settings) == pytest.approx(
        0.1 * (1 - 0.2 * 0.5)
    )
    assert adapted_kl_weight(0.1, 60.0, 500, KlInRewardConfig(coefficient=0.1)) == 0.1


def run_with(kl: np.ndarray, kl_coefficient: float | None, **settings: float) -> Any:
    """A run by RLOO over a reference that answers `kl`."""
    config = Config()
    config.algorithm.advantage = "rloo"
    config.algorithm.kl_in_reward = KlInRewardConfig(**settings)
    reference = SimpleNamespace(kl=lambda batch, plan, estimator: kl)
    metrics: dict[str, float] = {}
    return SimpleNamespace(
        config=config,
        roles=SimpleNamespace(critic=None, reference=reference, sleep_engines=lambda: None),
        planner=SimpleNamespace(forward_plan=lambda *arguments: None),
        progress=Progress(kl_coefficient=kl_coefficient),
        functions={},
        replay=SimpleNamespace(with_advantages=lambda whole, new: new),
        record=SimpleNamespace(
            phase=lambda name: nullcontext(),
            add=metrics.update,
            trains_on=lambda batch: None,
            metrics=metrics,
        ),
    )


def test_group_estimators_see_the_reward_less_the_kl_of_the_sequence() -> None:
    columns = {
        "reward": np.array([1.0, 0.0, 1.0, 1.0]),
        "group_number": np.array([0, 0, 1, 1]),
    }
    batch = RemoteBatch(columns | {"response_tokens": np.array([3, 1, 2, 2])}, {})
    kl = np.array([2.0, 0.0, 1.0, 5.0])
    # Near the mean, 2, and far from the sum.
    run = run_with(kl, None, coefficient=0.1, target=1.9, horizon=10)
    credited = with_advantages(run, batch)
    expected = rloo(np.array([0.8, 0.0, 0.9, 0.5]), columns["group_number"])
    assert credited["advantages"] == pytest.approx(expected)
    assert credited["reward"].tolist() == columns["reward"].tolist()
    assert run.record.metrics == {"reward/kl": 2.0, "reward/kl_coefficient": 0.1}
    assert run.kl_coefficient == pytest.approx(0.1 * (1 + (2 / 1.9 - 1) * 0.4))
    resumed = run_with(kl, run.kl_coefficient, coefficient=0.1)
    with_advantages(resumed, batch)
    assert resumed.record.metrics["reward/kl_coefficient"] == run.kl_coefficient


def test_each_row_of_a_sample_loses_the_kl_of_the_whole_sample() -> None:
    sample = np.array([0, 0, 1, 2, 3])
    columns = {
        "reward": np.array([1.0, 1.0, 0.0, 1.0, 1.0]),
        "group_number": np.array([0, 0, 0, 1, 1]),
    }
    batch = RemoteBatch(
        columns | {"sample_number": sample, "response_tokens": np.array([2, 1, 1, 2, 2])},
        {},
    )
    run = run_with(np.array([1.5, 0.5, 0.0, 1.0, 5.0]), None, coefficient=0.1)
    credited = with_advantages(run, batch)
    expected = rloo(np.array([0.8, 0.0, 0.9, 0.5]), np.array([0, 0, 1, 1]))
    assert credited["advantages"] == pytest.approx(expected[sample])
    assert run.record.metrics["reward/kl"] == 2.0


def test_it_brings_the_reference_and_old_log_probs(workspace: Path) -> None:
    config = load(
        "config.yaml",
        [
            ON,
            "batch.mini_batches=1",
            "policy.forward_max_tokens_per_micro_batch=96",
            "reference.path=model",
        ],
    )
    check(config)
    assert config.uses_reference
    assert config.old_log_probs == "forward_pass"
    check(
        load(
            "config.yaml",
            [ON, "algorithm.advantage=gae", "algorithm.loss.kl_coefficient=0.1"],
        )
    )
