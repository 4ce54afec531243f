"""Scores of reward models, and their scales in a run.

samples --reward models, one after the other--> scores --weight--> rewards          all samples
                                                  '--ScoreScales--> (s - mean) / std instead, in training
"""

import math
from collections.abc import Mapping

import numpy as np

from controller.actors.worker_group import WorkerGroup
from controller.config import Config
from controller.config.role_table import path_setting
from controller.planning.planner import Planner
from controller.rollout.samples import RolloutBatch
from workers.errors import RolloutError


def part_of(name: str) -> str:
    """Return the name of a model's scores among the parts of rewards."""
    return f"model_{name}" if name else "model"


def with_model_scores(
    config: Config, group: WorkerGroup, planner: Planner, rollout: RolloutBatch
) -> RolloutBatch:
    """Add each model's scores to the rewards. Raises RolloutError for a score that is not finite."""
    plan = planner.forward_plan(rollout.last_rows, "reward_model.scores")
    for name, weight in config.reward.model.named_weights.items():
        scores = group.score(rollout.last_rows, plan, name)
        if wrong := int(np.sum(~np.isfinite(scores))):
            raise RolloutError(
                f"{path_setting('reward_model', name)}={config.models_of('reward_model')[name].path}: "
                f"{wrong} of {len(scores)} scores are not finite. Check its weights, or set "
                "model.dtype=float32."
            )
        rollout = rollout.with_reward_part(part_of(name), scores, weight=weight)
    return rollout


class ScoreScales:
    """Running mean and standard deviation of each model's scores in training (Chan et al. 1979).

    state: number, mean and summed squared deviations of the scores so far, by the model's name.
    """

    def __init__(self, state: Mapping[str, list[float]]) -> None:
        self.state = dict(state)

    def normalize(self, config: Config, rollout: RolloutBatch) -> RolloutBatch:
        """Count new scores, and replace them in the rewards by their distance from the mean in deviations."""
        for name, weight in config.reward.model.named_weights.items():
            part = part_of(name)
            scores = np.array([score.parts[part] for score in rollout.by_sample.values()])
            change = self._scale(name, scores) - scores
            rollout = rollout.with_reward_part(part, scores, added=weight * change)
        return rollout

    def _scale(self, name: str, scores: np.ndarray) -> np.ndarray:
        count, mean, squares = self.state.get(name, (0.0, 0.0, 0.0))
        total = count + len(scores)
        distance = float(scores.mean()) - mean
        squares += (
            float(np.square(scores - scores.mean()).sum())
            + distance**2 * count * len(scores) / total
        )
        mean += distance * len(scores) / total
        self.state[name] = [total, mean, squares]
        return np.asarray((scores - mean) / (math.sqrt(squares / total) + 1e-8))
