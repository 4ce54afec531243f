"""ReferenceWorker: the frozen policy that a KL compares with."""

import numpy as np

from balancing import RankPlan
from workers.dataproto import DataProto
from workers.dispatch import Join, Split, dispatch
from workers.model.credit import sequence_kl
from workers.model_worker import ModelWorker, sequences_from


class ReferenceWorker(ModelWorker):
    """One rank of the reference: log-probs, forward only."""

    @dispatch(Split.PLAN, Join.ROWS)
    def kl(self, batch: DataProto, plan: RankPlan, estimator: str) -> np.ndarray:
        """Estimated KL of each sequence, nats, float64 [B]; the batch has `old_log_probs` and `reference_log_probs`."""
        return sequence_kl(sequences_from(batch), estimator).numpy()
