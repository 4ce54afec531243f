"""Planner: the global plan of a batch, as the settings of a run ask for it."""

import numpy as np

from balancing import CostModel, Plan, plan_batch
from balancing.errors import CountError
from balancing.redeal import redealt
from controller.config import TrainingConfig
from controller.plan_arguments import plan_arguments
from workers.errors import ConfigError
from workers.remote_batch import RemoteBatch


class Planner:
    """Plans for the data-parallel ranks of the training roles, which all share the policy's."""

    def __init__(self, config: TrainingConfig, cost_model: CostModel) -> None:
        """`cost_model`: FLOPs of a sequence, which a plan balances."""
        self.config, self.cost_model = config, cost_model

    def whole(self, batch: RemoteBatch, of: str) -> Plan:
        """One forward-only pass over the batch; see `plan`."""
        return self.plan(batch, [np.arange(len(batch))], of)

    def plan(self, batch: RemoteBatch, mini_batches: list[np.ndarray], of: str) -> Plan:
        """Who computes what and when; mini-batches stay as drawn.

        batch: light columns `length`, `response_tokens` and `uid`. of: a pass in `config.limits`, such as
        `policy.update`. Raises ConfigError where the batch has too few sequences for the counts of micro-batches.
        """
        try:
            return plan_batch(
                batch["length"],
                mini_batches=mini_batches,
                loss_tokens=batch["response_tokens"],
                groups=_group_numbers(batch),
                cost_model=self.cost_model,
                **plan_arguments(self.config, of),
            )
        except CountError as error:
            raise ConfigError(
                f"{of}: {error} (policy.min_micro_batches or forward_min_micro_batches, and balance.count_multiple)"
            ) from None

    def redealt(self, batch: RemoteBatch, drawn: list[np.ndarray]) -> list[np.ndarray]:
        """Mini-batches of equal workload, of whole groups, with balance.redeal_groups; else `drawn` as it is.

        There are fewer than were drawn where groups are fewer. batch: light columns `length` and `uid`.
        """
        if not self.config.balance.redeal_groups:
            return drawn
        groups = _group_numbers(batch)
        if groups.max() + 1 < len(drawn):
            drawn = np.array_split(np.arange(len(batch)), groups.max() + 1)
        return redealt(drawn, groups, self.cost_model.workload(batch["length"]))


def _group_numbers(batch: RemoteBatch) -> np.ndarray:
    """int64 [B], 0, 1, ... by `uid`."""
    numbers: np.ndarray = np.unique(batch["uid"], return_inverse=True)[1]
    return numbers
