"""Credit: from rewards to what the policy learns from, an advantage for each sequence or for each token.

rewards, uids --estimator, on the driver--> advantages [B]
rewards --critic: values, GAE, where the tokens are--> advantages, returns, old_values, token by token
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from balancing import Plan
from controller import advantages
from controller.config import AlgorithmConfig, Config
from workers.metrics import Metrics, results
from workers.model.losses import explained_variance
from workers.remote_batch import RemoteBatch

if TYPE_CHECKING:
    from controller.roles import Roles

MakePlan = Callable[[RemoteBatch, list[np.ndarray], int], Plan]
"""(batch, rows of each mini-batch, cap on tokens) -> Plan."""


class Credit:
    """Assigns credit as `algorithm.advantage` says."""

    def __init__(self, config: Config, roles: "Roles", make_plan: MakePlan) -> None:
        self._config, self._roles, self._plan = config, roles, make_plan

    def assign(self, batch: RemoteBatch) -> tuple[RemoteBatch, dict[str, float]]:
        """The batch with `advantages`, and for a critic's update `returns` and `old_values`; and what there is to log.

        batch: light columns `reward`, `uid`, `response_tokens`; tokens `input_ids`, `loss_mask`.
        """
        if self._roles.critic is None:
            return batch.with_columns(advantages=sequence_advantages(self._config.algorithm, batch)), {}
        plan = self._plan(batch, [np.arange(len(batch))], self._config.critic_forward_max_tokens)
        valued = self._roles.critic.advantages(batch, plan, self._config.algorithm.gae)
        return batch.with_tokens(**valued.tokens), value_metrics(valued.metrics)


def sequence_advantages(algorithm: AlgorithmConfig, batch: RemoteBatch) -> np.ndarray:
    """One advantage a sequence by the estimator that `algorithm.advantage` names, float32 [B]."""
    columns = {"reward": batch["reward"], "uid": batch["uid"], "tokens": batch["response_tokens"]}
    estimated = advantages.estimate(
        algorithm.advantage, columns, normalize_by_std=algorithm.normalize_by_std, k=algorithm.pass_k
    )
    return estimated.astype(np.float32)


def value_metrics(metrics: Metrics) -> dict[str, float]:
    """What is logged of a critic's values before its update, from the merged metrics of `value_statistics`."""
    measured = results(metrics)
    return {
        "critic/values": measured["values"],
        "critic/returns": measured["returns"],
        "critic/explained_variance": explained_variance(metrics),
    }
