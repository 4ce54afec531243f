"""Every query of the dashboard names what a run exports, and Grafana's placement has no overlap."""

import json
import re
import subprocess
import sys
from pathlib import Path

from controller.observability.declaration import Kind
from controller.observability.grafana_dashboard import dashboard
from controller.observability.metric_catalog import EXPORTED

REPOSITORY = Path(__file__).parents[3]


def exported() -> dict[str, set[str]]:
    """{name in Prometheus: its labels}."""
    found = {}
    for declaration in EXPORTED.values():
        histogram = declaration.kind is Kind.HISTOGRAM
        name = declaration.series + ("_bucket" if histogram else "")
        found[name] = {"run", *declaration.labels} | ({"le"} if histogram else set())
    return found


def test_every_query_names_an_exported_metric_and_its_labels() -> None:
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    assert queries
    for query in queries:
        (name,) = re.findall(r"\bray_\w+", query)
        (labels,) = re.findall(r"by \((.*?)\)", query)
        assert set(labels.split(", ")) == exported()[name]
    variables = dashboard()["templating"]["list"]
    (runs,) = [variable["query"] for variable in variables if variable["type"] == "query"]
    assert re.findall(r"\bray_\w+", runs)[0] in exported()


def test_panels_lie_side_by_side_within_24_columns() -> None:
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_the_command_prints_the_dashboard_as_json() -> None:
    command = [sys.executable, "-m", "controller.observability.grafana_dashboard"]
    printed = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True, check=True).stdout
    assert json.loads(printed) == dashboard()
