"""The pass over a mini-batch that `controller.primitives.learn` runs before each optimiser step.

ForwardBackward           metrics
RecordedForwardBackward   also what an UpdateRecord keeps, for run.record_samples
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from balancing import Plan
from balancing.mini_batch import MiniBatch
from controller.rollout.update_record import UpdateRecord
from workers.batch.dispatch import PlanResult
from workers.batch.metrics import Metrics, results
from workers.batch.remote_batch import RemoteBatch

if TYPE_CHECKING:
    from controller.actors.worker_group import GroupFuture, WorkerGroup


class ForwardBackward:
    """A pass that returns its metrics."""

    def start(
        self,
        group: "WorkerGroup",
        batch: RemoteBatch,
        plan: Plan,
        mini_batch: MiniBatch,
        loss: Any,
    ) -> "GroupFuture":
        """Start the pass on every rank."""
        part = replace(plan, mini_batches=(mini_batch,))
        return group.forward_backward.remote(batch, part, loss)

    def metrics(self, mini_batch: MiniBatch, result: Any, step_metrics: Metrics) -> Metrics:
        """Return the metrics of a finished pass. step_metrics: of the optimiser step after it."""
        return result


class RecordedForwardBackward(ForwardBackward):
    """A pass whose log-probs and metrics are added to a record."""

    def __init__(self, record: UpdateRecord):
        self.record = record

    def start(
        self,
        group: "WorkerGroup",
        batch: RemoteBatch,
        plan: Plan,
        mini_batch: MiniBatch,
        loss: Any,
    ) -> "GroupFuture":
        # Joined tokens are those of a whole batch. Its rows stand in the order of the plan.
        rows = np.arange(len(mini_batch.rows))
        part = replace(plan, mini_batches=(replace(mini_batch, rows=rows),))
        return group.forward_backward_log_probs.remote(
            batch.select(mini_batch.rows), part, loss
        )

    def metrics(
        self, mini_batch: MiniBatch, result: PlanResult, step_metrics: Metrics
    ) -> Metrics:
        self.record.log_probs[mini_batch.rows] = result.tokens["log_probs"]
        self.record.metrics.append(results(result.metrics | step_metrics))
        self.record.loss_tokens.append(mini_batch.loss_tokens)
        return result.metrics
