"""Planner: the global plan of a batch, as the settings of a run ask for it."""

from typing import Literal, cast

import numpy as np

from balancing import CostModel, Plan, plan_batch
from balancing.alignment import group_cap
from balancing.plan import PlanAlgorithm
from controller.config import TrainingConfig
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
        policy = self.config.policy
        return plan_batch(
            batch["length"],
            ranks=policy.ranks,
            mini_batches=mini_batches,
            max_tokens=group_cap(max_tokens, policy.parallel.context_parallel),
            max_sequences=policy.max_sequences or None,
            loss_tokens=batch["response_tokens"],
            groups=np.unique(batch["uid"], return_inverse=True)[1],
            cost_model=self.cost_model,
            algorithm=cast(PlanAlgorithm, self.config.balance.algorithm),
            layout=cast(Literal["packed", "padded"], self.config.model.layout),
            length_multiple=self.config.length_multiple,
        )
