"""docs/metrics.md, from the declarations: `python -m controller.observability.metric_page > docs/metrics.md`."""

from collections.abc import Iterable

from controller.observability.declaration import Declaration
from controller.observability.live_catalog import LIVE
from controller.observability.metric_catalog import SECTIONS

INTRODUCTION = """\
# Metrics

Made by `python -m controller.observability.metric_page` from `controller/observability/metric_catalog.py`, where a new
metric is declared.

A line of `metrics.jsonl` holds the metrics of one step; TensorBoard, Weights & Biases and MLflow get the same numbers
under the same names (MLflow has no `@`: there `pass@8` is `pass_at_8`). Prometheus has them from
the metrics port of Ray under the second name in the first column, with `run` and the names in braces as labels.
Counters are numbers of one step in `metrics.jsonl`, except those "so far", and sums over the run in Prometheus.
"""
LIVE_INTRODUCTION = """\
## In Prometheus alone

Values within a step: of single samples, engines and ranks. The sum of a histogram (`_sum`) is Ray's estimate from
its buckets.
"""
TABLE = """\
<div class="keys metrics" markdown>

| name, and in Prometheus | unit | meaning | joined | recorded when |
| --- | --- | --- | --- | --- |
{rows}

</div>
"""
"""The classes, here and below, are those of docs/stylesheets/extra.css: on a narrow screen each row is a paragraph."""
LIVE_TABLE = """\
<div class="keys live" markdown>

| in Prometheus | labels | unit | meaning | exported |
| --- | --- | --- | --- | --- |
{rows}

</div>
"""


def page() -> str:
    """The whole page, in Markdown."""
    sections = (f"## {title}\n\n{_table(TABLE, map(_row, found))}" for title, found in SECTIONS.items())
    return "\n".join([INTRODUCTION, *sections, LIVE_INTRODUCTION, _table(LIVE_TABLE, map(_live_row, LIVE))])


def _table(around: str, rows: Iterable[str]) -> str:
    return around.format(rows="\n".join(rows))


def _row(declaration: Declaration) -> str:
    when = declaration.when or "always"
    names = f"`{declaration.name}`<br>`{declaration.series}` ({declaration.kind.value})"
    cells = (names, declaration.unit, declaration.meaning, declaration.joined, when)
    return f"| {' | '.join(cells)} |"


def _live_row(declaration: Declaration) -> str:
    labels = ", ".join(f"`{label}`" for label in declaration.labels)
    exported = f"`{declaration.series}` ({declaration.kind.value})"
    return f"| {exported} | {labels} | {declaration.unit} | {declaration.meaning} | {declaration.when} |"


if __name__ == "__main__":
    print(page(), end="")
