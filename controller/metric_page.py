"""docs/metrics.md, from the declarations: `python -m controller.metric_page > docs/metrics.md`."""

from controller.metric_catalog import SECTIONS, Declaration, Kind

INTRODUCTION = """\
# Metrics

Made by `python -m controller.metric_page` from `controller/metric_catalog.py`, where a new metric is declared.

A line of `metrics.jsonl` holds the metrics of one step; TensorBoard, Weights & Biases and MLflow get the same numbers
under the same names (MLflow has no `@`: there `pass@8` is `pass_at_8`). Prometheus has them from
the metrics port of Ray under the names of the last column, with `run` and what stands in braces as labels.
Counters are numbers of one step in `metrics.jsonl` and sums over the run in Prometheus.
"""
HEADER = "| name | unit | meaning | joined | recorded when | in Prometheus |\n| --- | --- | --- | --- | --- | --- |"


def page() -> str:
    """The whole page, in Markdown."""
    sections = (
        "\n".join([f"## {title}", "", HEADER, *map(_row, declarations)]) for title, declarations in SECTIONS.items()
    )
    return "\n".join([INTRODUCTION, "\n\n".join(sections)]) + "\n"


def _row(declaration: Declaration) -> str:
    when = declaration.when or "always"
    suffix = "_total" if declaration.kind is Kind.COUNTER else ""
    exported = f"`ray_{declaration.exported_name}{suffix}` ({declaration.kind.value})"
    cells = (f"`{declaration.name}`", declaration.unit, declaration.meaning, declaration.joined, when, exported)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")
