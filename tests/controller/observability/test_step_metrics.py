import numpy as np
import pytest

from controller.observability.step_metrics import staleness, throughput, waiting
from workers.batch.remote_batch import RemoteBatch


def test_staleness_counts_versions_behind_the_policy() -> None:
    oldest, newest = np.array([3, 5, 4, 5]), np.array([4, 5, 5, 5])
    assert staleness(oldest, newest, {5: 6, 3: 2}, 5) == {
        "rollout/staleness_mean": 0.75,
        "rollout/staleness_max": 2.0,
        "rollout/versions_per_sample": 1.5,
        "rollout/tokens_of_age_2": 0.25,
        "rollout/tokens_of_age_0": 0.75,
    }


def test_shares_of_waiting_are_of_the_whole_step() -> None:
    assert waiting(0.5, 3, {"step": 2.0, "rollout": 0.5}) == {
        "rollout/trainer_idle_share": 0.25,
        "rollout/engine_idle_share": 0.25,
        "rollout/queued": 3.0,
    }


def test_throughput_is_of_the_step_the_wait_for_samples_and_the_update() -> None:
    generated = RemoteBatch(
        {"length": np.array([10, 20]), "response_tokens": np.array([4, 8])}, {}
    )
    trained = generated.select(np.array([1]))
    rates = throughput(generated, trained, {"step": 10.0, "rollout": 4.0, "update": 5.0})
    assert rates["throughput/tokens_per_s"] == pytest.approx(3.0)
    assert rates["throughput/rollout_tokens_per_s"] == pytest.approx(3.0)
    assert rates["throughput/update_tokens_per_s"] == pytest.approx(4.0)
    assert (rates["tokens/rollout"], rates["tokens/update"]) == (12.0, 20.0)
    assert "throughput/update_tokens_per_s" not in throughput(
        generated, trained, {"step": 10.0, "rollout": 4.0}
    )
