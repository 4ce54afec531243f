"""UpdateRecord: what an update computed, for run.record_samples."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class UpdateRecord:
    """What an update computed. log_probs: token column [B] that the loss has seen. metrics: of each
    mini-batch. loss_tokens: of each mini-batch, by which token means divide.
    """

    log_probs: np.ndarray
    metrics: list[dict[str, float]] = field(default_factory=list)
    loss_tokens: list[int] = field(default_factory=list)
