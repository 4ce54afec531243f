"""The tracker behind the dashboard: every declared metric as a gauge or counter of Ray, which Prometheus scrapes.

step's metrics --declaration_of--> ray.util.metrics --> metrics port of each node, /metrics --> Prometheus, Grafana
"""

import math
from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge

from controller.metric_catalog import Declaration, Kind, declaration_of


class RayTracker:
    """Exports under `Declaration.exported_name` with the labels of the family and `run`, the run's name."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._exported: dict[str, Gauge | Counter] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes below a millisecond. What nothing declares is in the other trackers alone."""
        del step
        for name, value in metrics.items():
            found = declaration_of(name)
            if found is not None and math.isfinite(value):
                self._export(found[0], {"run": self._run} | found[1], value)

    def _export(self, declaration: Declaration, labels: dict[str, str], value: float) -> None:
        name = declaration.exported_name
        if name not in self._exported:
            kind = Counter if declaration.kind is Kind.COUNTER else Gauge
            self._exported[name] = kind(name, f"{declaration.meaning} [{declaration.unit}]", tuple(labels))
        metric = self._exported[name]
        if isinstance(metric, Gauge):
            metric.set(value, labels)
        elif value > 0:  # a counter of Ray takes no 0
            metric.inc(value, labels)

    def close(self, *, succeeded: bool) -> None:
        """Ray drops a process's metrics when it ends."""
        del succeeded
