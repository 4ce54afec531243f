"""Export every metric of metrics.yaml through Ray, where Prometheus scrapes it.

a step's metrics, live metrics --spec_of--> ray.util.metrics --> each node's /metrics --> Prometheus, Grafana
"""

import math
from threading import Event, Lock, Thread

from ray.util.metrics import Counter, Gauge, Histogram

from controller.observability.metric_table import BUCKETS, Kind, MetricSpec, spec_of

# Ray reports every 10 s, with RAY_metrics_report_interval_ms at most every second.
REPEAT_SECONDS = 0.5
_so_far: dict[tuple[str, str], float] = {}
"""Last value of each total by run and name. Global, like Ray's counters, which a recovered run continues."""


class RayMetrics:
    """Exports under `MetricSpec.exported_name`, with the family's labels and `run`, the run's name.

    with RayMetrics(run) as metrics: ...        gauges keep their values while the block lasts
    """

    def __init__(self, run: str) -> None:
        """Ray must be up, because it loses metrics made before."""
        self._run = run
        self._exported: dict[str, Gauge | Counter | Histogram] = {}
        self._values: dict[str, tuple[Gauge, dict[str, str], float]] = {}
        self._lock = Lock()
        self._ended = Event()
        self._thread = Thread(target=self._repeat, name="metrics", daemon=True)

    def export(self, name: str, value: float) -> None:
        """Set, add or count a value, in microseconds. Ignores values that are not finite or not in
        metrics.yaml.
        """
        if not math.isfinite(value) or (entry := spec_of(name)) is None:
            return
        spec = entry[0]
        labels = {"run": self._run} | entry[1]
        with self._lock:
            metric = self._metric(spec, tuple(labels))
            if isinstance(metric, Gauge):
                self._values[name] = metric, labels, value
                metric.set(value, labels)
            elif isinstance(metric, Histogram):
                metric.observe(value, labels)
            else:
                if spec.kind is Kind.TOTAL:
                    key = self._run, name
                    value, _so_far[key] = growth(_so_far.get(key, 0.0), value), value
                if value > 0:  # a counter of Ray takes no 0
                    metric.inc(value, labels)

    def _repeat(self) -> None:
        """Repeat gauges: Ray forgets values older than two reports, so a long step would have gaps."""
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

    def _metric(
        self, spec: MetricSpec, labels: tuple[str, ...]
    ) -> Gauge | Counter | Histogram:
        name = spec.exported_name
        if name not in self._exported:
            text = f"{spec.meaning} [{spec.unit}]" if spec.unit else spec.meaning
            if spec.kind is Kind.HISTOGRAM:
                self._exported[name] = Histogram(name, text, BUCKETS[spec.unit], labels)
            else:
                self._exported[name] = (Gauge if spec.kind is Kind.GAUGE else Counter)(
                    name, text, labels
                )
        return self._exported[name]


def growth(previous: float, now: float) -> float:
    """Return the increase of a cumulative value, which a restart sets to 0."""
    return now - previous if now >= previous else now
