"""Planner: the global plan of a batch, as the settings of a run ask for it."""

import numpy as np

from balancing import CostModel, Plan, plan_batch
from controller.config import TrainingConfig
from controller.plan_arguments import plan_arguments
from workers.remote_batch import RemoteBatch


class Planner:
    """Plans for the data-parallel ranks of the training roles, which all share the policy's."""

    def __init__(self, config: TrainingConfig, cost_model: CostModel) -> None:
        """`cost_model`: FLOPs of a sequence, which a plan balances."""
        self.config, self.cost_model = config, cost_model

    def whole(self, batch: RemoteBatch, max_tokens: int) -> Plan:
        """One forward-only pass over the batch; see `plan`."""
        return self.plan(batch, [np.arange(len(batch))], max_tokens)

    def plan(self, batch: RemoteBatch, mini_batches: list[np.ndarray], max_tokens: int) -> Plan:
        """Who computes what and when; mini-batches stay as drawn.

        batch: light columns `length`, `response_tokens` and `uid`. max_tokens: cap on a micro-batch of one rank.
        """
        return plan_batch(
            batch["length"],
            mini_batches=mini_batches,
            loss_tokens=batch["response_tokens"],
            groups=np.unique(batch["uid"], return_inverse=True)[1],
            **plan_arguments(self.config, self.cost_model, max_tokens),
        )
