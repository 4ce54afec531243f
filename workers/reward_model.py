"""RewardModelWorker: a frozen model that gives each whole sequence a score."""

import numpy as np

from balancing import RankPlan
from workers.dataproto import DataProto
from workers.dispatch import Join, Split, dispatch
from workers.model_worker import ModelWorker, micro_batches_of


class RewardModelWorker(ModelWorker):
    """One rank of the reward model."""

    head = "value"

    @dispatch(Split.PLAN, Join.ROWS)
    def score(self, batch: DataProto, plan: RankPlan) -> np.ndarray:
        """The model's score of each sequence, prompt and response, read at its last token: float64 [B]."""
        scores = self.engine.scores(batch, micro_batches_of(plan))
        self.free_cached_memory()
        return scores.double().numpy()
