"""metrics.yaml: one meaning a name, names that Prometheus takes, and the page and the dashboard that follow
from it.
"""

import json
import re
from pathlib import Path

import pytest

from controller.observability import metric_table
from controller.observability.metric_page import page
from controller.observability.metric_table import (
    BUCKETS,
    LIVE,
    METRICS,
    SECTIONS,
    Kind,
    MetricSpec,
    spec_of,
)

REPOSITORY = Path(__file__).parents[3]


def test_the_page_in_the_docs_is_made_from_the_table() -> None:
    written = (REPOSITORY / "docs" / "metrics.md").read_text()
    assert written == page(), "run python -m controller.observability.metric_page"


def test_every_metric_is_declared_once_and_exported_under_a_name_of_its_own() -> None:
    specs = [spec for section in SECTIONS.values() for spec in section]
    assert len(METRICS) == len(specs)
    exported = [(spec.exported_name, spec.labels) for spec in specs]
    assert len(set(exported)) == len(exported)
    assert all(re.fullmatch(r"ballast(_[A-Za-z0-9]+)+", name) for name, _ in exported)
    assert all(spec.meaning for spec in specs)
    assert all(spec.unit in BUCKETS for spec in specs if spec.kind is Kind.HISTOGRAM)
    assert all(spec.when for spec in SECTIONS[LIVE])


@pytest.mark.parametrize(
    ("name", "declared", "labels"),
    [
        ("reward/mean", "reward/mean", {}),
        ("reward/format", "reward/{part}", {"part": "format"}),
        ("time/log_probs_s", "time/{phase}_s", {"phase": "log_probs"}),
        ("throughput/tokens_per_s", "throughput/tokens_per_s", {}),
        ("validation/gsm8k/pass@4", "validation/{score}", {"score": "gsm8k/pass@4"}),
    ],
)
def test_an_exact_name_precedes_a_family_and_a_family_gives_labels(
    name: str, declared: str, labels: dict[str, str]
) -> None:
    assert spec_of(name) == (METRICS[declared], labels)


@pytest.mark.parametrize(
    "name", ["rewards/mean", "time/step", "balance/imbalance", "", "step"]
)
def test_an_undeclared_name_is_not_found(name: str) -> None:
    assert spec_of(name) is None


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("time/{phase}_s", "ray_ballast_time_seconds"),
        ("throughput/tokens_per_s", "ray_ballast_throughput_tokens_per_second"),
        ("balance/cap_fill", "ray_ballast_balance_cap_fill_ratio"),
        ("balance/idle_share_before", "ray_ballast_balance_idle_share_before"),
        ("restarts/engines", "ray_ballast_restarts_engines_total"),
        ("micro_step/{role}/{rank}/{phase}_s", "ray_ballast_micro_step_seconds"),
    ],
)
def test_prometheus_has_units_written_out(name: str, series: str) -> None:
    assert METRICS[name].series == series


DASHBOARD = json.loads(
    Path(metric_table.__file__).with_name("grafana_dashboard.json").read_text()
)


def drawn(query: str) -> MetricSpec:
    """The metric of a query of the dashboard. Raises where there is none."""
    (name,) = re.findall(r"\bray_\w+", query)
    (spec,) = [
        spec
        for spec in METRICS.values()
        if name == spec.series + "_bucket" * (spec.kind is Kind.HISTOGRAM)
    ]
    return spec


def test_every_query_of_the_dashboard_names_an_exported_metric_and_its_labels() -> None:
    for target in (target for panel in DASHBOARD["panels"] for target in panel["targets"]):
        spec = drawn(target["expr"])
        (labels,) = re.findall(r"by \((.*?)\)", target["expr"])
        assert set(labels.split(", ")) == {"run", *spec.labels} | (
            {"le"} if spec.kind is Kind.HISTOGRAM else set()
        )
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) == {
            "run",
            *spec.labels,
        }
    (runs,) = [
        variable["query"]
        for variable in DASHBOARD["templating"]["list"]
        if variable["type"] == "query"
    ]
    assert drawn(runs) is METRICS["reward/mean"]


def test_panels_lie_side_by_side_within_24_columns() -> None:
    cells = set()
    for place in (panel["gridPos"] for panel in DASHBOARD["panels"]):
        found = {
            (place["x"] + x, place["y"] + y)
            for x in range(place["w"])
            for y in range(place["h"])
        }
        assert not cells & found and place["x"] + place["w"] <= 24
        cells |= found
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
