"""Trackers: where a run's metrics go.

    step's metrics --> Tracker.log of each: metrics.jsonl | TensorBoard | Weights & Biases | MLflow | Ray (Prometheus)

Each is opened with what it needs to go on after a resume and closed with whether the run succeeded. A tracker whose
service is away does not stop a run; what could not be written is said at the end.
"""

from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """One place that metrics go to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step (from 1; 0 is the validation before training)."""

    def close(self, *, succeeded: bool) -> None:
        """Write what is not written yet, and say how the run ended."""
