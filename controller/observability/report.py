"""The report: one page about a run, `runs/NAME/report.html`; needs no network. `controller.report` is its command.

    RunFolder --charts (SVG), cards, tables--> Jinja template, every text escaped --> report.html

What a model or a data set wrote cannot become part of the page's structure: the template escapes all texts, only charts
of our own go in as they are, and the page's content security policy allows neither scripts nor requests. Secrets are
masked (`shown_text`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from controller.config import Config, TrainingConfig
from controller.config.recorded import load_recorded
from controller.config.training import counted
from controller.observability import report_charts as charts
from controller.observability.health import warnings
from controller.observability.run_folder import Row, RunFolder
from controller.observability.shown_text import redacted, shortened

FILE = "report.html"
TEXT = 600  # characters of a prompt, or a response, in a table
SHOWN_SAMPLES = 12
NUMBER, CODE = "n", "t"
"""Formats of a column: right-aligned number, code."""
BALANCE_NOTE = (
    "All ranks wait for the heaviest micro-batch of a micro-step. Imbalance: how much longer the micro-steps of an "
    "update take than if no rank waited, by the cost model: in the given order, after Karmarkar-Karp alone (largest "
    "differencing over ranks and micro-batches, whatever caps say), and as planned, which is refined from there."
)


@dataclass(frozen=True)
class Card:
    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """Charts under a title. charts: trusted `<svg>` elements. wide: they need all of the page's width."""

    title: str
    charts: Sequence[Markup]
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Column:
    name: str
    kind: str = NUMBER


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]] = field(default_factory=list)


def write_report(folder: Path) -> Path:
    """Write the report of a run into its folder and return its path.

    Raises DataError for a folder without metrics, ConfigError if its config.yaml does not fit this version.
    """
    path = folder / FILE
    path.write_text(page(RunFolder(folder), load_recorded(folder / "config.yaml")), encoding="utf-8")
    return path


def page(run: RunFolder, config: TrainingConfig) -> str:
    """The page as HTML."""
    environment = Environment(
        loader=PackageLoader("controller.observability", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template(FILE).render(
        name=redacted(config.run.name),
        lead=redacted(config.headline),
        cards=_cards(run, config),
        warnings=warnings(run.metrics, samples=config.samples),
        sections=_sections(run, config),
        tables=[table for table in (_slowest(run), _longest(run), _validation(run)) if table.rows],
        command="`--settings` behind the command explains every key",
        config=redacted((run.path / "config.yaml").read_text(encoding="utf-8")),
    )


def _cards(run: RunFolder, config: TrainingConfig) -> list[Card]:
    steps = run.metrics[-1]["step"]
    found = [Card("steps", f"{steps:,}", f"{len(run.lengths)} with an update")]
    for label, name in (("reward", "reward/mean"), ("validation reward", "validation/reward"), ("loss", "policy/loss")):
        if values := run.curve(name).values:
            change = f"{values[-1] - values[0]:+.3f} since the first" if len(values) > 1 else ""
            found.append(Card(label, f"{values[-1]:.3f}", change))
    for label, name, form in (
        ("seconds a step", "time/step_s", ".2f"),
        ("tokens/s", "throughput/tokens_per_s", ",.0f"),
    ):
        if values := run.curve(name).values:
            found.append(Card(label, f"{sorted(values)[len(values) // 2]:{form}}", "median" if len(values) > 1 else ""))
    before, after = (run.curve(f"balance/imbalance{when}/micro_steps").values for when in ("_before", ""))
    if after and config.policy.ranks > 1:
        note = f"{_mean(before):.1%} as given"
        if alone := run.curve("balance/imbalance_karmarkar_karp/micro_steps").values:
            note += f", {_mean(alone):.2%} Karmarkar-Karp"
        found.append(Card("imbalance, mean", f"{_mean(after):.2%}", note))
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _sections(run: RunFolder, config: TrainingConfig) -> list[Section]:
    """Every picture of the report that this run has something for."""
    title = "Reward" if isinstance(config, Config) else "Loss"
    learning = charts.learning(run)
    sections = [Section(title + " and validation" * (len(learning) > 1), _charts(learning))]
    if panels := charts.lengths(run):
        sections.append(Section("Lengths", _charts(panels)))
        sections.append(_balance_and_time(run, config))
        if drawn := charts.gantt(run, config):
            step, picture = drawn
            note = f"Update of step {step}, planned again from its recorded lengths."
            sections.append(Section("Who computes when", [Markup(picture)], note, wide=True))
        sections.append(Section("Policy", _charts(charts.policy(run))))
    return sections


def _balance_and_time(run: RunFolder, config: TrainingConfig) -> Section:
    if config.policy.ranks == 1:  # nobody waits for anybody
        return Section("Time", _charts([charts.time(run)]))
    return Section("Balance and time", _charts([charts.imbalance(run), charts.time(run)]), BALANCE_NOTE)


def _charts(panels: Iterable[Any]) -> list[Markup]:
    return [Markup(charts.svg(panel)) for panel in panels]


SAMPLE_COLUMNS = (
    Column("step"), Column("sample"), Column("tokens"), Column("seconds"), Column("reward"), Column("prompt", CODE),
    Column("response", CODE),
)  # fmt: skip


def _slowest(run: RunFolder) -> Table:
    return Table(
        "Slowest samples",
        "By the seconds from the engine's receipt of the request to its last token; of those recorded at each step.",
        SAMPLE_COLUMNS,
        _sample_rows(run.samples, "seconds"),
    )


def _longest(run: RunFolder) -> Table:
    rows = _sample_rows(run.samples, "response_tokens")
    return Table("Longest samples", "By tokens of the response.", SAMPLE_COLUMNS, rows)


def _sample_rows(samples: Iterable[Row], by: str) -> list[list[str]]:
    chosen = sorted(samples, key=lambda row: -(row[by] or 0))[:SHOWN_SAMPLES]
    return [
        [
            f"{row['step']:,}",
            f"{row.get('uid', '')}/{row['sample']}",
            f"{row['response_tokens'] or 0:,}",
            f"{row['seconds'] or 0:.2f}",
            f"{_reward(row):.3f}",
            *(redacted(shortened(str(row.get(name, "")), TEXT)) for name in ("prompt", "response")),
        ]
        for row in chosen
    ]


def _validation(run: RunFolder) -> Table:
    """The worst and the best held-out responses, by reward."""
    step, rows = run.last_validation
    ordered = sorted(rows, key=lambda row: _reward(row))
    half = SHOWN_SAMPLES // 2
    chosen = ordered if len(ordered) <= SHOWN_SAMPLES else ordered[:half] + ordered[-half:]
    columns = [Column("prompt", CODE), Column("response", CODE), Column("reward")]
    table = [
        [redacted(shortened(str(row.get(name, "")), TEXT)) for name in ("prompt", "response")] + [f"{_reward(row):.3f}"]
        for row in chosen
    ]
    note = f"Validation at step {step}: {len(chosen)} of {counted(len(rows), 'response')}, "
    note += "the lowest and the highest rewards."
    return Table("Held-out responses", note, columns, table)


def _reward(row: Mapping[str, Any]) -> float:
    return float("-inf") if row["reward"] is None else float(row["reward"])
