"""Trackers: where a run's metrics go.

    step's metrics --> Tracker.log of each: metrics.jsonl | TensorBoard | Weights & Biases | MLflow | Ray (Prometheus)
    some samples --> Tracker.table of each:                 TensorBoard | Weights & Biases | MLflow

Each is opened with the state that a resume needs, and closed with whether the run succeeded. A tracker whose service is
unreachable does not stop a run; missing metrics are logged at the end.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tracker(Protocol):
    """One place that metrics go to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step (from 1; 0 is the validation before training)."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show `rows`, texts and numbers by column, as the table `name` of a step, where the place can."""

    def close(self, *, succeeded: bool) -> None:
        """Write what is not written yet, and say how the run ended."""
