import numpy as np
import pytest

from controller.observability.metrics import staleness, throughput
from workers.remote_batch import RemoteBatch


def test_staleness_counts_versions_behind_the_policy() -> None:
    assert staleness(np.array([3, 5, 4, 5]), 5) == {"rollout/staleness_mean": 0.75, "rollout/staleness_max": 2.0}


def test_throughput_is_of_the_step_the_wait_for_samples_and_the_update() -> None:
    generated = RemoteBatch({"length": np.array([10, 20]), "response_tokens": np.array([4, 8])}, {})
    trained = generated.select(np.array([1]))
    rates = throughput(generated, trained, {"step": 10.0, "rollout": 4.0, "update": 5.0})
    assert rates["throughput/tokens_per_s"] == pytest.approx(3.0)
    assert rates["throughput/rollout_tokens_per_s"] == pytest.approx(3.0)
    assert rates["throughput/update_tokens_per_s"] == pytest.approx(4.0)
    assert (rates["tokens/rollout"], rates["tokens/update"]) == (12.0, 20.0)
    assert "throughput/update_tokens_per_s" not in throughput(generated, trained, {"step": 10.0, "rollout": 4.0})
