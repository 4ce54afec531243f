"""Print docs/metrics.md from metrics.yaml: `python -m controller.observability.metric_page >
docs/metrics.md`.
"""

from controller.observability.metric_table import LIVE, SECTIONS, MetricSpec

INTRODUCTION = """\
# Metrics

Made by `python -m controller.observability.metric_page` from `controller/observability/metrics.yaml`. \
Declare a new
metric there.

A line of `metrics.jsonl` holds the metrics of one step. TensorBoard, Weights & Biases and MLflow get \
the same numbers
under the same names (MLflow has no `@`: there `pass@8` is `pass_at_8`). Prometheus reads them from Ray's \
metrics port
under the second name in the first column, with `run` and the names in braces as labels.
Counters are numbers of one step in `metrics.jsonl`, except those "so far", and sums over the run in \
Prometheus.
"""
LIVE_INTRODUCTION = """
Values within a step: of single samples, engines and ranks. The sum of a histogram (`_sum`) is Ray's \
estimate from
its buckets.
"""
HEADS = {
    "metrics": ("name, and in Prometheus", "unit", "meaning", "joined", "recorded when"),
    "live": ("in Prometheus", "labels", "unit", "meaning", "exported"),
}
"""Columns of the two kinds of tables, by their class of docs/stylesheets/extra.css: on a narrow screen each
row is a paragraph.
"""


def page() -> str:
    return INTRODUCTION + "".join(
        f"\n## {title}\n{_table(title, specs)}" for title, specs in SECTIONS.items()
    )


def _table(title: str, specs: list[MetricSpec]) -> str:
    name, row, text = (
        ("live", _live_row, LIVE_INTRODUCTION) if title == LIVE else ("metrics", _row, "")
    )
    lines = [HEADS[name], ("---",) * 5, *map(row, specs)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f'{text}\n<div class="keys {name}" markdown>\n\n{table}\n\n</div>\n'


def _row(spec: MetricSpec) -> tuple[str, ...]:
    names = f"`{spec.name}`<br>`{spec.series}` ({spec.prometheus_kind})"
    return names, spec.unit, spec.meaning, spec.joined, spec.when or "always"


def _live_row(spec: MetricSpec) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    return (
        f"`{spec.series}` ({spec.prometheus_kind})",
        labels,
        spec.unit,
        spec.meaning,
        spec.when,
    )


if __name__ == "__main__":
    print(page(), end="")
