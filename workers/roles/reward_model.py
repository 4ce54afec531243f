"""RewardModelWorker: scores sequences. RewardModelTrainer: trains one, at the cells of tokens with
`loss_mask`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from balancing import RankPlan
from workers.batch.dataproto import DataProto
from workers.batch.dispatch import Join, Split, dispatch
from workers.batch.metrics import Metrics
from workers.config.loss import WeightedLossConfig
from workers.model.losses import (
    Statistics,
    ValuePredictions,
    make_score_loss,
    mean,
    score_errors,
    weighted_values,
)
from workers.roles.model_worker import ModelWorker, TrainedWorker, micro_batches_of


class RewardModelWorker(ModelWorker):
    """One rank of the reward models."""

    head = "value"

    @dispatch(Split.PLAN, Join.ROWS)
    def score(self, batch: DataProto, plan: RankPlan, name: str = "") -> np.ndarray:
        """Return the score of each sequence, prompt and response, read at its last token: float64 [B].

        name: of one of several models.
        """
        scores = self.engines[name].scores(batch, micro_batches_of(plan))
        self.free_cached_memory()
        return scores.numpy()


class RewardModelTrainer(RewardModelWorker, TrainedWorker):
    cells = "own"

    def loss_function(self, loss: Any) -> Callable[..., Any]:
        """`WeightedLossConfig` reads `coefficient` [B]. A name of `score_errors` reads `label`."""
        return (
            weighted_values
            if isinstance(loss, WeightedLossConfig)
            else make_score_loss(loss)
        )

    @dispatch(Split.PLAN, Join.METRICS)
    def measure_labels(self, batch: DataProto, plan: RankPlan, loss: str) -> Metrics:
        """Return `loss` and the statistics of `score_errors`, forward only."""
        _, metrics = self.engine.values(
            batch, micro_batches_of(plan), partial(_measure, loss), self.cells
        )
        self.free_cached_memory()
        return metrics


def _measure(name: str, predictions: ValuePredictions) -> Statistics:
    losses, statistics = score_errors(name, predictions)
    return {"loss": mean(losses), **statistics}
