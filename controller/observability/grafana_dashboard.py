"""A Grafana dashboard of runs, over what `trackers.ray_metrics` exports.

    cd /tmp/ray/session_latest/metrics/grafana/dashboards
    python -m controller.observability.grafana_dashboard > ballast.json

Ray's own Grafana settings show every dashboard of that folder (RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR names another).
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from controller.observability.declaration import Kind
from controller.observability.metric_catalog import EXPORTED, METRICS

PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 8, 7, 3  # of Grafana's 24 columns
RUNS = '{run=~"$run"}'
QUANTILES = (0.5, 0.99)  # of histograms
CURVES, STATES = "timeseries", "state-timeline"


@dataclass(frozen=True)
class Panel:
    """One graph: its title, Grafana's name of the unit, the declared metrics that it draws, and Grafana's type of it.

    STATES shows when each series was 1.
    """

    title: str
    unit: str
    metrics: tuple[str, ...]
    type: str = CURVES


PANELS = (
    Panel("Phase", "short", ("phase/{phase}",), STATES),
    Panel("Engines", "short", ("engine/state/{replica}/{state}",), STATES),
    Panel("Requests", "short", ("rollout/requests_waiting", "engine/requests_in_flight/{replica}")),
    Panel("Reward", "short", ("reward/mean", "reward/std", "reward/{part}")),
    Panel("Rewards of a step's samples", "short", ("sample/reward/{quantile}",)),
    Panel("Held-out scores", "short", ("validation/{score}",)),
    Panel("Response length", "short", ("rollout/response_tokens_mean", "rollout/response_tokens_max")),
    Panel("Response lengths", "short", ("sample/response_tokens",)),
    Panel("Time of a sample", "s", ("sample/generation_s",)),
    Panel("Loss", "short", ("policy/loss", "critic/loss")),
    Panel("KL and entropy", "short", ("policy/approximate_kl", "policy/reference_kl", "policy/entropy")),
    Panel("Gradient norm", "short", ("policy/grad_norm", "critic/grad_norm")),
    Panel(
        "Tokens per second",
        "short",
        ("throughput/tokens_per_s", "throughput/rollout_tokens_per_s", "throughput/update_tokens_per_s"),
    ),
    Panel("Time of a step by phase", "s", ("time/{phase}_s",)),
    Panel("Steps, tokens", "short", ("run/steps", "tokens/{phase}")),
    Panel("Time of a micro-step", "s", ("micro_step/{role}/{rank}/{phase}_s",)),
    Panel("Time of a rank, predicted", "s", ("rank/{role}/{rank}/{phase}_s", "rank_predicted/{role}/{rank}/{phase}_s")),
    Panel("Error of predicted times", "percentunit", ("balance/predicted_time_error",)),
    Panel("Sampler against trainer", "short", ("policy/rollout_mismatch_mean", "policy/rollout_mismatch_max")),
    Panel(
        "Imbalance before and after",
        "percentunit",
        ("balance/imbalance_before/{over}", "balance/imbalance_karmarkar_karp/{over}", "balance/imbalance/{over}"),
    ),
    Panel(
        "Idle, padding",
        "percentunit",
        ("balance/idle_share_before", "balance/idle_share", "balance/padding_share", "balance/padding_removed/{of}"),
    ),
    Panel("Share of the cap", "percentunit", ("balance/cap_fill",)),
    Panel(
        "Samples dropped, retried, without signal",
        "short",
        ("rollout/samples_dropped", "rollout/samples_retried", "rollout/samples_left_out"),
    ),
    Panel("Staleness", "short", ("rollout/staleness_mean", "rollout/staleness_max")),
    Panel("Tokens by age", "percentunit", ("rollout/tokens_of_age_{age}",)),
    Panel("Waiting", "percentunit", ("rollout/trainer_idle_share", "rollout/engine_idle_share")),
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


def queries(panel: Panel, name: str) -> dict[str, str]:
    """{legend: query} of what a panel draws of the declared metric `name`.

    A gauge's value, of a counter what a run has had so far, of a histogram the quantiles of what came lately.
    """
    declaration = EXPORTED[name]
    labels = ("run", *declaration.labels)
    legend = "{{run}} " + re.sub(r"\{(\w+)\}", r"{{\1}}", name)  # Grafana writes {{phase}} for a label
    if declaration.kind is not Kind.HISTOGRAM:
        largest = f"max by ({', '.join(labels)}) ({declaration.series}{RUNS})"
        return {legend: f"{largest} == 1" if panel.type == STATES else largest}
    rate = f"sum by ({', '.join((*labels, 'le'))}) (rate({declaration.series}_bucket{RUNS}[$__rate_interval]))"
    return {f"{legend} p{quantile * 100:g}": f"histogram_quantile({quantile}, {rate})" for quantile in QUANTILES}


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(index, COLUMNS)
    drawn = [found for name in panel.metrics for found in queries(panel, name).items()]
    return {
        "id": index + 1,
        "title": panel.title,
        "type": panel.type,
        "datasource": "${datasource}",
        "gridPos": {"x": column * PANEL_WIDTH, "y": row * PANEL_HEIGHT, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend}
            for number, (legend, query) in enumerate(drawn)
        ],
    }


def _runs() -> dict[str, Any]:
    values = f"label_values({METRICS['reward/mean'].series}, run)"
    return _variable(
        "run", type="query", query=values, datasource="${datasource}", includeAll=True, multi=True, refresh=2
    )


def _variable(name: str, **settings: Any) -> dict[str, Any]:
    return {"name": name} | settings


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
