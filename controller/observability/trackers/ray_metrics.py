"""The tracker behind the dashboard: every declared metric as one of Ray's, which Prometheus scrapes.

step's metrics --declaration_of--+
live ----------------------------+--> ray.util.metrics --> metrics port of each node, /metrics --> Prometheus, Grafana
"""

import math
from collections.abc import Mapping, Sequence
from threading import Event, Lock, Thread
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from controller.observability.declaration import Declaration, Kind
from controller.observability.live_catalog import STEP, STEPS
from controller.observability.metric_catalog import declaration_of

REPEAT_SECONDS = 0.5  # Ray reports every 10 s, with RAY_metrics_report_interval_ms=1000 every second, and not oftener
_so_far: dict[tuple[str, ...], float] = {}
"""Last value of each cumulative counter. Global, as Ray's counters are: a recovered run continues them."""


class RayMetrics:
    """Exports under `Declaration.exported_name` with the labels of the family and `run`, the run's name.

    with RayMetrics(run) as metrics: ...        gauges keep their values while the block lasts
    """

    def __init__(self, run: str) -> None:
        """Ray must be up: metrics made before are lost."""
        self._run = run
        self._exported: dict[str, Gauge | Counter | Histogram] = {}
        self._values: dict[tuple[str, ...], tuple[Gauge, dict[str, str], float]] = {}
        self._lock, self._ended = Lock(), Event()
        self._thread = Thread(target=self._repeat, name="metrics", daemon=True)

    def export(self, declaration: Declaration, labels: Mapping[str, str], value: float) -> None:
        """Set, add or count a value; takes some microseconds. One that is not finite is left out."""
        if not math.isfinite(value):
            return
        labels = {"run": self._run} | dict(labels)
        key = (declaration.name, *labels.values())
        with self._lock:
            metric = self._metric(declaration, tuple(labels))
            if isinstance(metric, Gauge):
                self._values[key] = metric, labels, value
                metric.set(value, labels)
            elif isinstance(metric, Histogram):
                metric.observe(value, labels)
            else:
                if declaration.so_far:
                    value, _so_far[key] = growth(_so_far.get(key, 0.0), value), value
                if value > 0:  # a counter of Ray takes no 0
                    metric.inc(value, labels)

    def _repeat(self) -> None:
        """Ray forgets a gauge that was not set since its last two reports: that of a long step would have gaps."""
        while not self._ended.wait(REPEAT_SECONDS):
            with self._lock:
                for gauge, labels, value in self._values.values():
                    gauge.set(value, labels)

    def __enter__(self) -> "RayMetrics":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _metric(self, declaration: Declaration, labels: tuple[str, ...]) -> Gauge | Counter | Histogram:
        name = declaration.exported_name
        if name not in self._exported:
            text = f"{declaration.meaning} [{declaration.unit}]" if declaration.unit else declaration.meaning
            if declaration.kind is Kind.HISTOGRAM:
                self._exported[name] = Histogram(name, text, list(declaration.boundaries), labels)
            else:
                self._exported[name] = (Counter if declaration.kind is Kind.COUNTER else Gauge)(name, text, labels)
        return self._exported[name]


class RayTracker:
    """Exports the metrics of steps."""

    def __init__(self, metrics: RayMetrics) -> None:
        self._metrics = metrics

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes about a millisecond. What nothing declares is in the other trackers alone."""
        self._metrics.export(STEP, {}, step)
        self._metrics.export(STEPS, {}, float(step > 0))
        for name, value in metrics.items():
            found = declaration_of(name)
            if found is not None:
                self._metrics.export(*found, value)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """No effect: Prometheus has numbers alone."""

    def close(self, *, succeeded: bool) -> None:
        """No effect: the maker of `metrics` closes it."""
        del succeeded


def growth(before: float, now: float) -> float:
    """Increase of a cumulative value; all of it after a restart."""
    return now - before if now >= before else now
