"""Shows a comparison of strategies: a table for the terminal, a picture, and a self-contained HTML page.

outcomes (strategies.py) --> table          --> terminal (rich), page (HTML)
                         --> Gantt charts   --> PNG, page (SVG)
plan --> explain.py      --> text           --> terminal, page
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

from balancing.analysis.gantt import Chart, save_png, to_svg
from balancing.analysis.pipeline_comparison import PIPELINE_COLUMNS, PipelineOutcome
from balancing.analysis.pipeline_gantt import pipeline_svg
from balancing.analysis.strategies import OURS, Batch, Outcome
from balancing.pipeline import Pipeline

COLUMNS = ("strategy", "over ideal", "over cap", "padding", "micro-steps", "idle, mean", "idle, worst", "to plan")
NOTE = (
    "Over ideal: step time compared with workload of the real tokens / ranks; in a micro-step all ranks wait for the "
    "heaviest. Over cap: micro-batches above the cap. Padding: share of computed tokens; it takes time. "
    "Idle: share of a rank's time. To plan: planning time on this machine, with warm compiled code. The published "
    "systems form mini-batches of their own."
)

PIPELINE_NOTE = (
    "Over ideal: predicted time compared with workload / ranks / stages. Bubble: share of the stages' time that they "
    "wait. Over bound: above a lower bound for all plans with as many micro-steps. Small ends: the published order, "
    "light micro-steps first and last. To plan: planning time on this machine, with warm compiled code."
)

_DEFAULTS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "max_sequences": (None,),
        "min_count": (1,),
        "multiple_of": (1,),
        "algorithm": ("karmarkar_karp",),
        "order": (None, "descending", "makespan"),
        "allow_empty": (True,),
        "layout": ("packed",),
        "length_multiple": (1,),
    }
)
"""Values of `Batch.arguments` that the headline leaves out."""


def cells(outcome: Outcome) -> list[str]:
    """The texts of an outcome for `COLUMNS`."""
    return [
        outcome.name,
        _share(outcome.over_ideal, "+"),
        f"{outcome.violations:,}",
        f"{outcome.padding:.1%}",
        f"{outcome.micro_batches:,}",
        _share(outcome.idle_mean),
        _share(outcome.idle_worst),
        _duration(outcome.seconds),
    ]


def terminal_table(batch: Batch, outcomes: Sequence[Outcome]) -> Table:
    """The comparison as a rich table; violations of the cap are red, our strategies bold."""
    table = _empty_table(headline(batch), COLUMNS, NOTE)
    for outcome in outcomes:
        row = cells(outcome)
        row[2] = f"[red]{row[2]}[/red]" if outcome.violations else row[2]
        table.add_row(*row, style="bold" if outcome.name.startswith(OURS) else None)
    return table


def _empty_table(title: str, columns: Sequence[str], note: str) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        title=title,
        caption=note,
        title_justify="left",
        caption_justify="left",
    )
    for name in columns:
        justify: Literal["left", "right"] = "left" if name == columns[0] else "right"
        table.add_column(name.replace(" ", "\n").replace("-", "-\n"), justify=justify, no_wrap=True)
    return table


def pipeline_table(batch: Batch, pipeline: Pipeline, outcomes: Sequence[PipelineOutcome]) -> Table:
    """The comparison of plans for a pipeline as a rich table; ours is bold."""
    table = _empty_table(pipeline_headline(batch, pipeline), PIPELINE_COLUMNS, PIPELINE_NOTE)
    for outcome in outcomes:
        table.add_row(*outcome.cells(), style="bold" if outcome.name == OURS else None)
    return table


def pipeline_headline(batch: Batch, pipeline: Pipeline) -> str:
    """One line that describes the batch and the pipeline."""
    virtual = f" of {pipeline.virtual_stages} virtual stages" if pipeline.virtual_stages > 1 else ""
    return f"{headline(batch)}; stages: {pipeline.stages}{virtual}"


def headline(batch: Batch) -> str:
    """One line that describes the batch, and with what else than the defaults it is planned."""
    lengths = batch.lengths
    others = "".join(f", {name}={value}" for name, value in batch.arguments.items() if value not in _DEFAULTS[name])
    return (
        f"{len(lengths):,} sequences, {lengths.sum():,} tokens (longest {lengths.max():,}); ranks: {batch.ranks}, "
        f"mini-batches: {len(batch.mini_batches)}, max_tokens={batch.max_tokens:,}{others}"
    )


def write_png(batch: Batch, before: Outcome, after: Outcome, path: Path) -> None:
    """Write two Gantt charts, one above the other; OSError if the file cannot be written."""
    save_png([Chart(outcome.name, outcome.grids) for outcome in (before, after)], batch.ideal, path)


def write_html(batch: Batch, outcomes: Sequence[Outcome], explanation: str, path: Path) -> None:
    """Write the page: table, a chart of every strategy on one time axis, and the explanation of the plan."""
    charts = to_svg([Chart(outcome.name, outcome.grids) for outcome in outcomes], batch.ideal)
    table = _html_table(COLUMNS, (_html_row(outcome, outcome.name.startswith(OURS)) for outcome in outcomes))
    _write_page(path, headline(batch), table, NOTE, "Ranks over time", charts, explanation)


def write_pipeline_html(
    batch: Batch, pipeline: Pipeline, outcomes: Sequence[PipelineOutcome], explanation: str, path: Path
) -> None:
    """Write the page of plans for a pipeline, with a chart of the stages for each."""
    rows = (_html_cells(outcome.cells(), outcome.name == OURS) for outcome in outcomes)
    table, charts = _html_table(PIPELINE_COLUMNS, rows), pipeline_svg(outcomes, pipeline)
    title = pipeline_headline(batch, pipeline)
    _write_page(path, title, table, PIPELINE_NOTE, "Stages over time", charts, explanation)


def _write_page(path: Path, title: str, table: str, note: str, heading: str, charts: str, explanation: str) -> None:
    page = _PAGE.format(
        style=_STYLE,
        headline=escape(title),
        table=table,
        note=escape(note),
        heading=heading,
        charts=charts,
        explanation=_html_blocks(explanation),
    )
    path.write_text(page, encoding="utf-8")


def _share(value: float, sign: str = "") -> str:
    """Per cent with about three digits."""
    decimals = 2 if value < 0.1 else 1 if value < 1 else 0
    return f"{value:{sign}.{decimals}%}"


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.{0 if seconds >= 0.01 else 1}f} ms"


def _html_table(columns: Sequence[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _html_cells(texts: Sequence[str], ours: bool) -> str:
    opening = '<tr class="ours">' if ours else "<tr>"
    return f"{opening}{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>"


def _html_row(outcome: Outcome, marked: bool) -> str:
    texts = [f"<td>{escape(text)}</td>" for text in cells(outcome)]
    if outcome.violations:
        texts[2] = texts[2].replace("<td>", '<td class="broken">')
    opening = '<tr class="ours">' if marked else "<tr>"
    return f"{opening}{''.join(texts)}</tr>"


def _html_blocks(explanation: str) -> str:
    """The blocks of the explanation, each some text followed by a list."""
    return "".join(_html_block(block.split("\n")) for block in explanation.strip().split("\n\n"))


def _html_block(lines: Sequence[str]) -> str:
    opening = escape(" ".join(line for line in lines if not line.startswith("- ")))
    items = "".join(f"<li>{escape(line.removeprefix('- '))}</li>" for line in lines if line.startswith("- "))
    return f"<p>{opening}</p>{f'<ul>{items}</ul>' if items else ''}"


_STYLE = """
:root { color-scheme: light dark; --ink: #22313f; --soft: #5b6b79; --page: #fbfaf8; --paper: #ffffff; --edge: #e6e2dc;
  --waiting: #f3d9d6; --ours: #eef5f1; --broken: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe6ec; --soft: #9aa8b5; --page: #14191e; --paper: #1c232a; --edge: #303b45; --waiting: #5a3a3a;
    --ours: #20352d; --broken: #ff8a80; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0; }
main { max-width: 70rem; margin: 0 auto; padding: 2.5rem 1.5rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p.lead { margin: .3rem 0 1.6rem; color: var(--soft); } .wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; background: var(--paper); font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }
th { font-weight: 600; font-size: .82rem; color: var(--soft); text-align: right; vertical-align: bottom; }
th, td { padding: .5rem .7rem; border-bottom: 1px solid var(--edge); } td { text-align: right; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
tr.ours td { font-weight: 600; background: var(--ours); } td.broken { color: var(--broken); font-weight: 600; }
p.note { font-size: .85rem; color: var(--soft); }
svg { display: block; width: 100%; min-width: 46rem; height: auto; } svg text { fill: var(--ink); }
li { margin: .35rem 0; } ul { margin-top: .2rem; padding-left: 1.4rem; } main > p { margin-bottom: .2rem; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Balancing compared</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>Balancing compared</h1>
<p class="lead">{headline}</p>
<div class="wide">{table}</div>
<p class="note">{note}</p>
<h2>{heading}</h2>
<div class="wide">{charts}</div>
<h2>The plan explained</h2>
{explanation}
</main>
</body>
</html>
"""
