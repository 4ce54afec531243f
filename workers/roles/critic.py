"""CriticWorker: predicts values, computes advantages and returns, and learns from them.

values --GAE, on the ranks--> advantages, returns        returns --value loss--> critic
"""

from collections.abc import Callable
from typing import Any

import torch

from balancing import RankPlan
from workers.batch.dataproto import DataProto
from workers.batch.dispatch import Join, Split, dispatch
from workers.batch.metrics import Metrics
from workers.config.roles import GaeConfig
from workers.model.losses import make_value_loss, to_metrics, value_statistics
from workers.model.losses.returns import KlPenalty, discounts, gae, token_rewards, whiten
from workers.roles.model_worker import (
    TrainedWorker,
    micro_batches_of,
    token_block,
    token_column,
)


class CriticWorker(TrainedWorker):
    head = "value"

    @dispatch(Split.PLAN, Join.TOKENS, returns=("old_values", "advantages", "returns"))
    def advantages(
        self,
        batch: DataProto,
        plan: RankPlan,
        settings: GaeConfig,
        penalty: KlPenalty | None = None,
        gamma_per: str = "token",
    ) -> tuple[DataProto, Metrics]:
        """Return values before the update, advantages and returns of the policy's tokens, 0 elsewhere:
        float32, ragged.

        batch: `input_ids`, `loss_mask`, `reward` [B], `by_turn` [B] (optional, see `turns_of`) and, with a
        penalty, `old_log_probs` and `reference_log_probs`.
        """
        values, _ = self.engine.values(batch, micro_batches_of(plan))
        mask = batch.tokens["loss_mask"]
        lengths = batch.loss_token_counts.numpy()
        rewards = token_rewards(batch, penalty).numpy()
        token_values = values[mask].double()
        gammas = discounts(batch, settings.gamma, gamma_per)
        estimates = gae(
            rewards, token_values.numpy(), lengths, gamma=gammas, lam=settings.lam
        )
        advantages, returns = (torch.from_numpy(column) for column in estimates)
        counted = self.counted_tokens(batch)
        statistics = to_metrics([value_statistics(token_values[counted], returns[counted])])
        if settings.whiten:
            advantages = whiten(
                advantages, self.engine.data_parallel_groups, self.engine.device, counted
            )
        columns = {
            "advantages": token_column(mask, advantages),
            "returns": token_column(mask, returns),
        }
        self.free_cached_memory()
        return token_block(batch, old_values=values, **columns), statistics

    @dispatch(Split.PLAN, Join.TOKENS, returns=("values",))
    def values(self, batch: DataProto, plan: RankPlan) -> tuple[DataProto, Metrics]:
        """Return the value of the state before every token with `loss_mask`, float32, ragged, 0 elsewhere."""
        values, metrics = self.engine.values(batch, micro_batches_of(plan))
        self.free_cached_memory()
        return token_block(batch, values=values), metrics

    def loss_function(self, loss: Any) -> Callable[..., Any]:
        """`ValueLossConfig` reads `returns` and `old_values`, ragged."""
        return make_value_loss(loss)
