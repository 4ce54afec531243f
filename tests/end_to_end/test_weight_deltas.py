"""Runs with rollout.weight_sync=delta: engines have the weights that a whole update gives them,
bit for bit.
"""

from typing import Any

import numpy as np
import ray

from controller.run import Run
from tests.end_to_end import faults
from tests.end_to_end.faults import run_with, without_validation
from workers.config.roles import SamplingConfig
from workers.engine.requests import SampleRequest
from workers.engine.weights.weight_delta import checksum

OVERRIDES = (
    "rollout.weight_sync=delta",
    "model.dtype=bfloat16",
    "rollout.replicas=2",
    "rollout.threads=1",
    "policy.optimizer.learning_rate=2e-6",
    "run.steps=4",
    "tracking.tensorboard=false",
)


def log_probs(actor: Any) -> bytes:
    """Of greedy tokens after a prompt: any other weight gives others."""
    request = SampleRequest("probe", 0, np.arange(3, 20, dtype=np.int32), 1)
    stream = actor.generate.options(num_returns="streaming").remote(
        [request], SamplingConfig(max_new_tokens=16)
    )
    block, _ = (ray.get(ref) for ref in stream)
    return block.row(0)["rollout_log_probs"].tobytes()


def test_engines_have_the_policys_weights_after_any_updates_and_restarts(
    ray_session, settings: list[str]
) -> None:
    versions = []

    def compare(run: Run) -> None:
        """With what a whole update brings, in every engine, which then goes on with deltas."""
        whole, _ = run.roles.policy.export_weights()
        expected, engines = checksum(ray.get(whole)), run.roles.rollouts
        while len(engines.fleet.serving) < len(engines.actors):  # a new one starts
            engines.wait([])
        for actor in engines.actors.values():
            assert (
                ray.get(actor.__ray_call__.remote(lambda self: self._weights.version))
                == run.weight_version
            )
            file = ray.get(
                actor.__ray_call__.remote(
                    lambda self: np.fromfile(self._weights.path, np.uint8)
                )
            )
            assert checksum(file) == expected
            found = log_probs(actor)
            ray.get(actor.update_weights.remote(whole, run.weight_version))
            assert log_probs(actor) == found
        versions.append(run.weight_version)

    def kill(run: Run) -> None:
        compare(run)
        faults.kill_actor(run)

    overrides = [*without_validation(settings), *OVERRIDES, "run.name=deltas"]
    run = run_with(overrides, {1: compare, 2: compare, 3: kill, 4: compare})
    assert versions == [0, 1, 2, 3]
    assert run.last["restarts/engines"] == 1
    assert [step["rollout/weights_whole"] for step in run.outcome.steps] == [0] * 4
    assert all(0 < step["rollout/weights_changed"] < 0.2 for step in run.outcome.steps)
