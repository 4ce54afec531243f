"""Losses do not depend on ranks, shared sequences, caps and layout: whole runs from their configuration, in float64.

Every rank is a process with a driver of its own, which calls its own worker and exchanges the results with the others.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from controller.config.offline import OfflineConfig
from controller.config.training import ReferenceSettings
from controller.roles import TrainingRoles, _learning, _model_arguments
from tests.controller.offline.local_run import run_offline, write_offline_workspace
from tests.controller.stand_ins.local_ray import LocalRay
from tests.controller.stand_ins.run import NoMetrics
from tests.designs.configured import start_worker
from tests.workers.model.ranks import RankPool
from workers.dispatch import DISPATCH_ATTRIBUTE, Join, join_rows
from workers.metrics import merge
from workers.model_worker import ModelWorker
from workers.offline_policy import OfflinePolicyWorker
from workers.reference import ReferenceWorker

WAYS = {
    "1 rank": (1, []),
    "2 ranks, small caps": (2, ["policy.ranks=2", "policy.max_tokens=100"]),
    "ring 2": (2, ["policy.parallel.context_parallel=2", "policy.parallel.context_parallel_method=ring"]),
    "ulysses 2, padded": (2, ["policy.parallel.context_parallel=2", "model.layout=padded"]),
}


class OwnRank:
    """`WorkerGroup` of which this process has one worker."""

    def __init__(self, worker: ModelWorker) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, getattr(self._worker, name))

    def _call(self, method: Any, batch: Any, plan: Any, *others: Any) -> Any:
        place = self._worker.coordinates
        share = plan.for_rank(place.dp)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (place.leads_dp_group, method(batch.select(share.rows), share, *others)))
        leaders = [result for leads, result in parts if leads]
        if getattr(method, DISPATCH_ATTRIBUTE).join is Join.ROWS:
            return join_rows(plan, len(batch), leaders)
        return merge(leaders)


class OwnRoles(TrainingRoles):
    def take_micro_step_times(self) -> dict[str, Any]:
        return {}


@contextmanager
def own_roles(config: OfflineConfig, *_: Any, total_steps: int) -> Iterator[TrainingRoles]:
    arguments = _model_arguments(config, config.model, config.policy)
    arguments |= _learning(config, config.policy.optimizer, total_steps)
    policy, reference = start_worker(OfflinePolicyWorker, config, arguments), None
    if isinstance(config, ReferenceSettings) and config.starts_reference:
        arguments = _model_arguments(config, config.reference_model, config.reference)
        reference = start_worker(ReferenceWorker, config, arguments)
    yield OwnRoles(OwnRank(policy), reference and OwnRank(reference))


def curve(folder: str, command: str, run: str, overrides: list[str]) -> list[float]:
    """Losses of the steps, then of the validation after them."""
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        LocalRay({}).install(patch)
        patch.setattr("controller.watching.trackers.ray_metrics.RayMetrics", NoMetrics)
        patch.setattr("controller.roles.start_training_roles", own_roles)
        patch.setattr("controller.training_loop.TrainingLoop.save", lambda *_: None)
        own = [f"run.dir=runs-{dist.get_rank()}", "data.validation=held_out.jsonl"]
        outcome = run_offline(command, run, *own, *overrides)
    return [*(step["policy/loss"] for step in outcome.steps), outcome.after["loss"]]


@pytest.mark.parametrize("command", ["sft", "preferences"])
def test_curves_do_not_depend_on_ranks_layout_and_context_parallelism(
    ranks: RankPool, tmp_path: Path, command: str
) -> None:
    write_offline_workspace(tmp_path)
    expected: list[float] = []
    for way, (count, overrides) in WAYS.items():
        name = "-".join(way.replace(",", "").split())
        for found in ranks.run(curve, count, str(tmp_path), command, name, overrides):
            expected = expected or found
            assert found[:-1] == pytest.approx(expected[:-1], abs=1e-9), way
            assert found[-1] == pytest.approx(expected[-1], abs=1e-6), way  # log-probs come back in float32
    assert abs(expected[0] - expected[2]) > 1e-3, "the steps change what is compared"
