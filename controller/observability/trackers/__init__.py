"""Trackers: where a run's metrics go.

    step's metrics --> Tracker.log of each: metrics.jsonl | TensorBoard | Weights & Biases | MLflow | Ray (Prometheus)

Each is opened with the state that a resume needs, and closed with whether the run succeeded. A tracker whose service is
unreachable does not stop a run; missing metrics are logged at the end.
"""

from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """One place that metrics go to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step (from 1; 0 is the validation before training)."""

    def close(self, *, succeeded: bool) -> None:
        """Write what is not written yet, and say how the run ended."""
