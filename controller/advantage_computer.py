"""AdvantageComputer: from rewards to what the policy learns from, an advantage for each sequence or for each token.

rewards - weight * KL to the reference, uids --estimator, on the driver--> advantages [B]
rewards, KL to the reference --critic: values, GAE, where the tokens are--> advantages, returns, old_values
                             --REINFORCE++: discounted returns, likewise--> advantages
"""

from typing import TYPE_CHECKING

import numpy as np

from controller import advantages
from controller.checkpoint import Progress
from controller.config import Config
from controller.config.sections import AlgorithmConfig
from controller.planner import Planner
from workers.config import KlInRewardConfig
from workers.metrics import Metrics, results
from workers.model.credit import KlPenalty
from workers.model.losses import explained_variance
from workers.remote_batch import RemoteBatch

if TYPE_CHECKING:
    from controller.actors.roles import Roles

LARGEST_KL_ERROR = 0.2  # errors are clipped here, so that one outlier step does not derail the weight


class AdvantageComputer:
    """Computes advantages as `algorithm.advantage` says."""

    def __init__(self, config: Config, roles: "Roles", planner: Planner, progress: Progress) -> None:
        """`progress` carries the weight of the KL in the reward from step to step."""
        self._config, self._roles, self._planner, self._progress = config, roles, planner, progress

    def compute(self, batch: RemoteBatch) -> tuple[RemoteBatch, dict[str, float]]:
        """Returns the batch with `advantages`, and with `returns` and `old_values` for a critic's update; and metrics.

        batch: light columns `reward`, `uid`, `response_tokens`; tokens `input_ids`, `loss_mask`, and with a KL in the
        reward `old_log_probs`, `reference_log_probs`.
        """
        weight, kl, metrics = self._kl_in_reward(batch)
        penalty = KlPenalty(weight, self._config.algorithm.kl_in_reward.estimator) if weight else None
        if self._config.uses_token_returns:
            return self._with_token_returns(batch, penalty), metrics
        if self._roles.critic is None:
            rewards = batch["reward"] - weight * kl
            return batch.with_columns(advantages=sequence_advantages(self._config.algorithm, batch, rewards)), metrics
        plan = self._planner.whole(batch, "critic.values")
        valued = self._roles.critic.advantages(batch, plan, self._config.algorithm.gae, penalty)
        return batch.with_tokens(**valued.tokens), metrics | value_metrics(valued.metrics)

    def _with_token_returns(self, batch: RemoteBatch, penalty: KlPenalty | None) -> RemoteBatch:
        """REINFORCE++ with one advantage per token: workers compute them, because the tokens stay there."""
        algorithm, credited = self._config.algorithm, batch
        if algorithm.advantage == "reinforce_plus_plus_baseline":
            credited = batch.with_columns(reward=advantages.dr_grpo(batch["reward"], batch["uid"]))
        plan = self._planner.whole(batch, "policy.log_probs")
        found = self._roles.policy.token_advantages(credited, plan, algorithm.gamma, penalty)
        return batch.with_tokens(**found.tokens)

    def _kl_in_reward(self, batch: RemoteBatch) -> tuple[float, np.ndarray, dict[str, float]]:
        """Returns (weight, KL of each sequence [B], metrics) and stores the next step's weight in the progress."""
        settings = self._config.algorithm.kl_in_reward
        if not settings.coefficient:
            return 0.0, np.zeros(len(batch)), {}
        weight = settings.coefficient if self._progress.kl_coefficient is None else self._progress.kl_coefficient
        plan = self._planner.whole(batch, "reference.log_probs")
        kl = (self._roles.reference or self._roles.policy).kl(batch, plan, settings.estimator)
        self._progress.kl_coefficient = adapted_kl_weight(weight, float(kl.mean()), len(batch), settings)
        return weight, kl, {"reward/kl": float(kl.mean()), "reward/kl_coefficient": weight}


def adapted_kl_weight(coefficient: float, kl: float, sequences: int, settings: KlInRewardConfig) -> float:
    """Weight of the next step's KL (Ziegler et al. 2019, section 2.2), with a gain of `sequences / horizon`:

        e = clip((KL - target) / target, -0.2, 0.2)        beta' = beta (1 + e sequences / horizon)

    kl: mean over the step's sequences, nats. Without a target the weight does not change.
    """
    if not settings.target:
        return coefficient
    error = (kl - settings.target) / settings.target
    error = min(max(error, -LARGEST_KL_ERROR), LARGEST_KL_ERROR)
    return coefficient * (1 + error * sequences / settings.horizon)


def sequence_advantages(algorithm: AlgorithmConfig, batch: RemoteBatch, rewards: np.ndarray) -> np.ndarray:
    """One advantage a sequence by the estimator that `algorithm.advantage` names, float32 [B]. rewards: float64 [B]."""
    columns = {"reward": rewards, "uid": batch["uid"], "tokens": batch["response_tokens"]}
    if "greedy_reward" in batch.columns:
        columns["greedy_reward"] = batch["greedy_reward"]
    estimated = advantages.estimate(
        algorithm.advantage, columns, normalize_by_std=algorithm.normalize_by_std, k=algorithm.pass_k
    )
    return estimated.astype(np.float32)


def value_metrics(metrics: Metrics) -> dict[str, float]:
    """Metrics of a critic's values before its update, from the merged metrics of `value_statistics`."""
    measured = results(metrics)
    return {
        "critic/values": measured["values"],
        "critic/returns": measured["returns"],
        "critic/explained_variance": explained_variance(metrics),
    }
