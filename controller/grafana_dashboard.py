"""A Grafana dashboard of runs, over what `controller.trackers.ray_metrics` exports.

    python -m controller.grafana_dashboard > /tmp/ray/session_latest/metrics/grafana/dashboards/ballast.json

Ray's own Grafana settings show every dashboard of that folder (RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR names another).
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from controller.metric_catalog import METRICS, Kind

PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 8, 7, 3  # of Grafana's 24 columns
RUNS = '{run=~"$run"}'


@dataclass(frozen=True)
class Panel:
    """One graph: its title, Grafana's name of the unit, and the declared metrics that it draws."""

    title: str
    unit: str
    metrics: tuple[str, ...]


PANELS = (
    Panel("Reward", "short", ("reward/mean", "reward/std", "reward/{part}")),
    Panel("Held-out scores", "short", ("validation/{score}",)),
    Panel("Response length", "short", ("rollout/response_tokens_mean", "rollout/response_tokens_max")),
    Panel("Loss", "short", ("policy/loss", "critic/loss")),
    Panel("KL and entropy", "short", ("policy/approximate_kl", "policy/reference_kl", "policy/entropy")),
    Panel("Gradient norm", "short", ("policy/grad_norm", "critic/grad_norm")),
    Panel(
        "Tokens per second",
        "short",
        ("throughput/tokens_per_s", "throughput/rollout_tokens_per_s", "throughput/update_tokens_per_s"),
    ),
    Panel("Time of a step by phase", "s", ("time/{phase}_s",)),
    Panel("Sampler against trainer", "short", ("policy/rollout_mismatch_mean", "policy/rollout_mismatch_max")),
    Panel("Imbalance before and after", "percentunit", ("balance/imbalance_before/{over}", "balance/imbalance/{over}")),
    Panel("Idle, padding", "percentunit", ("balance/idle_share_before", "balance/idle_share", "balance/padding_share")),
    Panel("Share of the cap", "percentunit", ("balance/cap_fill",)),
    Panel(
        "Samples dropped, retried, without signal",
        "short",
        ("rollout/samples_dropped", "rollout/samples_retried", "rollout/samples_without_signal"),
    ),
    Panel("Staleness", "short", ("rollout/staleness_mean", "rollout/staleness_max")),
    Panel("Weight versions", "short", ("rollout/weight_version", "rollout/oldest_weight_version")),
    Panel(
        "Restarts and failures",
        "short",
        ("restarts/engines", "restarts/recoveries", "checkpoint/failures", "reward/failures"),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard, in Grafana's JSON model."""
    return {
        "uid": "ballast",
        "title": "Ballast",
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "schemaVersion": 39,
        "templating": {"list": [_variable("datasource", type="datasource", query="prometheus"), _runs()]},
        "panels": [_panel(index, panel) for index, panel in enumerate(PANELS)],
    }


def query(name: str) -> str:
    """What draws the declared metric `name`: its value, or of a counter what a run has had so far."""
    declaration = METRICS[name]
    counter = declaration.kind is Kind.COUNTER
    by = ", ".join(("run", *declaration.labels))
    return f"max by ({by}) (ray_{declaration.exported_name}{'_total' if counter else ''}{RUNS})"


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(index, COLUMNS)
    return {
        "id": index + 1,
        "title": panel.title,
        "type": "timeseries",
        "datasource": "${datasource}",
        "gridPos": {"x": column * PANEL_WIDTH, "y": row * PANEL_HEIGHT, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query(name), "legendFormat": _legend(name)}
            for number, name in enumerate(panel.metrics)
        ],
    }


def _legend(name: str) -> str:
    """`{phase}` as Grafana writes it, `{{phase}}`."""
    return "{{run}} " + re.sub(r"\{(\w+)\}", r"{{\1}}", name)


def _runs() -> dict[str, Any]:
    values = f"label_values(ray_{METRICS['reward/mean'].exported_name}, run)"
    return _variable(
        "run", type="query", query=values, datasource="${datasource}", includeAll=True, multi=True, refresh=2
    )


def _variable(name: str, **settings: Any) -> dict[str, Any]:
    return {"name": name} | settings


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
