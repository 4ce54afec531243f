"""Read every metric of a run from metrics.yaml: unit, meaning, kind, and name in Prometheus.

name of a metric --spec_of--> MetricSpec, labels --> Ray, Prometheus (`ray_metrics`)
SECTIONS --metric_page--> docs/metrics.md      --a test--> grafana_dashboard.json
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path

import yaml

TABLE = Path(__file__).with_name("metrics.yaml")
LIVE = "In Prometheus alone"
"""Section of `live_metrics`, whose values change within a step or are finer than a step."""
SECONDS = [
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    25.0,
    50.0,
    100.0,
    250.0,
    500.0,
    1000.0,
]
BUCKETS = {"s": SECONDS, "tokens": [float(2**power) for power in range(3, 18)]}
"""Upper ends of a histogram's buckets by unit. Ray takes none at or below 0."""


class Kind(StrEnum):
    """GAUGE: last value. COUNTER: sum over steps. TOTAL: counter of the run so far. HISTOGRAM: counts by
    size.
    """

    GAUGE = "gauge"
    COUNTER = "counter"
    TOTAL = "total"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class MetricSpec:
    """One metric, or a family whose names match one with `{label}`. metrics.yaml documents the fields."""

    name: str
    unit: str = ""
    meaning: str = ""
    joined: str = "one value"
    kind: Kind = Kind.GAUGE
    when: str = ""

    @cached_property
    def labels(self) -> tuple[str, ...]:
        return tuple(re.findall(r"\{(\w+)\}", self.name))

    @cached_property
    def exported_name(self) -> str:
        """Name in Ray: `ballast_policy_loss`, with units written out:
        https://prometheus.io/docs/practices/naming.

        Labels leave the name: `time/{phase}_s` is `ballast_time_seconds` with the label `phase`.
        """
        words = re.findall(r"[A-Za-z0-9]+", re.sub(r"\{\w+\}", "", self.name))
        if words[-1] == "s":
            words[-1] = "second" if "per" in words else "seconds"
        if self.unit == "share" and not {"share", "fraction"} & set(words):
            words.append("ratio")
        return "_".join(["ballast", *words])

    @property
    def prometheus_kind(self) -> str:
        return "counter" if self.kind is Kind.TOTAL else self.kind.value

    @property
    def series(self) -> str:
        """Name in Prometheus, without a histogram's `_bucket`, `_sum` or `_count`."""
        return f"ray_{self.exported_name}{'_total' if self.prometheus_kind == 'counter' else ''}"

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Regular expression for the family's names, with the labels as groups."""
        parts = re.split(r"\{(\w+)\}", self.name)
        return re.compile(
            "".join(
                f"(?P<{part}>.+)" if i % 2 else re.escape(part)
                for i, part in enumerate(parts)
            )
        )


def _spec(name: str, row: dict[str, str]) -> MetricSpec:
    kind = Kind(row.get("kind", "gauge"))
    joined = {"joined": "adds up"} if kind is Kind.COUNTER else {}
    return MetricSpec(name, **(joined | row | {"kind": kind}))  # type: ignore[arg-type]


def _read_sections() -> dict[str, list[MetricSpec]]:
    table = yaml.BaseLoader(TABLE.read_text(encoding="utf-8")).get_single_data()
    sections = {}
    for title, rows in table.items():
        sections[title] = [_spec(name, row) for name, row in rows.items()]
    return sections


SECTIONS = _read_sections()
METRICS = {spec.name: spec for specs in SECTIONS.values() for spec in specs}


@cache
def spec_of(name: str) -> tuple[MetricSpec, dict[str, str]] | None:
    """Find the spec of metric `name` and its labels, or None. An exact name precedes a family."""
    if name in METRICS:
        return METRICS[name], {}
    for spec in METRICS.values():
        if spec.labels and (match := spec.pattern.fullmatch(name)):
            return spec, match.groupdict()
    return None
