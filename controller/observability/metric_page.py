"""docs/metrics.md, from the declarations: `python -m controller.observability.metric_page > docs/metrics.md`."""

from controller.observability.metric_catalog import LIVE, SECTIONS, Declaration

INTRODUCTION = """\
# Metrics

Made by `python -m controller.observability.metric_page` from `controller/observability/metric_catalog.py`, where a new
metric is declared.

A line of `metrics.jsonl` holds the metrics of one step; TensorBoard, Weights & Biases and MLflow get the same numbers
under the same names (MLflow has no `@`: there `pass@8` is `pass_at_8`). Prometheus has them from
the metrics port of Ray under the names of the last column, with `run` and the names in braces as labels.
Counters are numbers of one step in `metrics.jsonl`, except those "so far", and sums over the run in Prometheus.
"""
LIVE_INTRODUCTION = """\
## In Prometheus alone

Values within a step: of single samples, engines and ranks. The sum of a histogram (`_sum`) is Ray's estimate from
its buckets.
"""
HEADER = "| name | unit | meaning | joined | recorded when | in Prometheus |\n| --- | --- | --- | --- | --- | --- |"
LIVE_HEADER = "| in Prometheus | labels | unit | meaning | exported |\n| --- | --- | --- | --- | --- |"


def page() -> str:
    """The whole page, in Markdown."""
    sections = (
        "\n".join([f"## {title}", "", HEADER, *map(_row, declarations)]) for title, declarations in SECTIONS.items()
    )
    live = [LIVE_INTRODUCTION, LIVE_HEADER, *map(_live_row, LIVE)]
    return "\n".join([INTRODUCTION, "\n\n".join(sections), "", *live]) + "\n"


def _row(declaration: Declaration) -> str:
    when = declaration.when or "always"
    exported = f"`{declaration.series}` ({declaration.kind.value})"
    cells = (f"`{declaration.name}`", declaration.unit, declaration.meaning, declaration.joined, when, exported)
    return f"| {' | '.join(cells)} |"


def _live_row(declaration: Declaration) -> str:
    labels = ", ".join(f"`{label}`" for label in declaration.labels)
    exported = f"`{declaration.series}` ({declaration.kind.value})"
    return f"| {exported} | {labels} | {declaration.unit} | {declaration.meaning} | {declaration.when} |"


if __name__ == "__main__":
    print(page(), end="")
