"""OfflinePolicyWorker: a policy that learns from given sequences."""

import numpy as np

from balancing import RankPlan
from workers.config import SupervisedLossConfig
from workers.dataproto import DataProto
from workers.dispatch import Join, Split, dispatch
from workers.metrics import Metric, Metrics
from workers.model.losses import make_sft_loss, weighted_log_probs
from workers.roles.model_worker import micro_batches_of
from workers.roles.policy import PolicyWorker


class OfflinePolicyWorker(PolicyWorker):
    @dispatch(Split.PLAN, Join.METRICS)
    def learn_tokens(self, batch: DataProto, plan: RankPlan, loss: SupervisedLossConfig) -> Metrics:
        """One optimiser step per mini-batch, on the likelihood of `loss_mask` tokens."""
        return self.train(batch, plan, make_sft_loss(loss.aggregation, loss.constant_length))

    @dispatch(Split.PLAN, Join.METRICS)
    def learn_weighted(self, batch: DataProto, plan: RankPlan) -> Metrics:
        """One optimiser step per mini-batch, on `weighted_log_probs` with the column `coefficient` [B]."""
        return self.train(batch, plan, weighted_log_probs)

    @dispatch(Split.PLAN, Join.METRICS)
    def measure_tokens(self, batch: DataProto, plan: RankPlan) -> Metrics:
        """Forward-only pass: `loss`, the mean negative log-likelihood of `loss_mask` tokens, and `entropy`."""
        log_probs, metrics = self.engine.log_probs(batch, micro_batches_of(plan))
        self.free_cached_memory()
        total = -float(log_probs.double().sum())
        return {"loss": Metric.mean(total, batch.num_loss_tokens, "tokens")} | metrics

    @dispatch(Split.PLAN, Join.ROWS)
    def reference_sequence_log_probs(self, batch: DataProto, plan: RankPlan) -> np.ndarray:
        """`sequence_log_probs` without the adapters. Raises ConfigError for a policy without adapters."""
        with self.engine.without_adapters():
            return self.sequence_log_probs(batch, plan)
