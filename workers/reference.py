"""ReferenceWorker: the frozen policy that a KL compares with."""

from workers.model_worker import ModelWorker


class ReferenceWorker(ModelWorker):
    """One rank of the reference: log-probs, forward only."""
