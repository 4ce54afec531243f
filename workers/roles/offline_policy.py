"""OfflinePolicyWorker: a policy that learns from given sequences instead of sampled ones."""

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
    """One rank of such a policy."""

    @dispatch(Split.PLAN, Join.METRICS)
    def learn_tokens(self, batch: DataProto, plan: RankPlan, loss: SupervisedLossConfig) -> Metrics:
        """One optimiser step for each mini-batch of the plan, on the likelihood of the tokens with `loss_mask`.

        batch: `input_ids`, `loss_mask`, ragged.
        """
        return self.train(batch, plan, make_sft_loss(loss.aggregation, loss.constant_length))

    @dispatch(Split.PLAN, Join.METRICS)
    def learn_weighted(self, batch: DataProto, plan: RankPlan) -> Metrics:
        """One optimiser step for each mini-batch of the plan, on weighted log-probs; see `weighted_log_probs`.

        batch: `input_ids`, `loss_mask`, ragged, and `coefficient` [B].
        """
        return self.train(batch, plan, weighted_log_probs)

    @dispatch(Split.PLAN, Join.METRICS)
    def measure_tokens(self, batch: DataProto, plan: RankPlan) -> Metrics:
        """`loss`, the mean negative log-likelihood of the tokens with `loss_mask`, and `entropy`; forward only."""
        log_probs, metrics = self.engine.log_probs(batch, micro_batches_of(plan))
        self.free_cached_memory()
        total = -float(log_probs.double().sum())
        return {"loss": Metric.mean(total, batch.num_loss_tokens, "tokens")} | metrics

    @dispatch(Split.PLAN, Join.ROWS)
    def reference_sequence_log_probs(self, batch: DataProto, plan: RankPlan) -> np.ndarray:
        """`sequence_log_probs` of the model without its adapters. Raises ConfigError for a policy without adapters."""
        with self.engine.without_adapters():
            return self.sequence_log_probs(batch, plan)
