"""A rank's part of an update, as the driver calls it: a step on each mini-batch."""

from dataclasses import replace
from typing import Any

from balancing import Plan
from workers.batch.dataproto import DataProto
from workers.batch.metrics import Metric, Metrics, merge
from workers.roles.model_worker import TrainedWorker


def update(
    worker: TrainedWorker, whole: DataProto, plan: Plan, rank: int, loss: Any
) -> Metrics:
    """whole: the batch of all ranks. rank: of the plan."""
    parts: list[Metrics] = []
    for mini_batch in plan.mini_batches:
        share = replace(plan, mini_batches=(mini_batch,)).for_rank(rank)
        found = worker.forward_backward(whole.select_idxs(share.rows.tolist()), share, loss)
        found["loss"] = Metric.sum(found["loss"].value / len(plan.mini_batches))
        parts += [found, worker.optimizer_step()]
    return merge(parts)
