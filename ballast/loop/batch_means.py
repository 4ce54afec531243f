"""Means over a batch whose rows several calls compute, each row once."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from workers.batch.remote_batch import RemoteBatch
from workers.errors import ConfigError


@dataclass
class BatchMean:
    """The batch whose mean the gradients since the last step are parts of. taken: its rows so far."""

    batch: RemoteBatch
    taken: np.ndarray

    @staticmethod
    def of(batch: RemoteBatch) -> "BatchMean":
        return BatchMean(batch, np.zeros(len(batch), bool))

    def take(self, batch: RemoteBatch, rows: np.ndarray, loss: Any) -> None:
        """Note rows as computed. Raises ConfigError for a second batch, or rows that were computed."""
        if self.batch is not batch:
            raise ConfigError(
                f"loss={type(loss).__name__}: it is a mean over the batch of an earlier call of this step, "
                "and this is another. Pass one batch and the rows of each call, or a sum, such as "
                "importance_sampling."
            )
        if self.taken[rows].any():
            raise ConfigError(
                "rows: some were computed since the last step. Pass each row once."
            )
        self.taken[rows] = True
