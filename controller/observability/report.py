"""Write a run's report: one page, `runs/NAME/report.html`, that needs no network.

    RunFolder --> charts (matplotlib, as SVG), cards, tables --> Jinja template --> report.html

The template escapes all texts of models and data, and inserts only our own charts unescaped. The content security
policy forbids scripts and requests. Secrets are masked.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from balancing import BalancingError, explain, plan_batch
from balancing.analysis.gantt import INK, chart_of_ranks, figure_of, svg_of
from balancing.analysis.lengths_file import recorded_arguments, run_step
from balancing.analysis.statistics import ideal_time, predicted_grids
from controller.config import Config, TrainingConfig
from controller.config.recorded import load_recorded
from controller.config.training import counted
from controller.observability.health import warnings
from controller.observability.run_folder import Row, RunFolder
from controller.observability.shown_text import redacted, shortened

FILE = "report.html"
TEXT = 600  # characters of a prompt, or a response, in a table
SHOWN_SAMPLES = 12
BLUE, GREEN, AMBER, ROSE, VIOLET, GREY = "#2f7fb8", "#3a9679", "#d9902f", "#c2566a", "#8069b0", "#7d8491"
COLOURS = (BLUE, GREEN, AMBER, ROSE, VIOLET, GREY)
"""A panel has at most as many lines, so that they can be told apart."""
SIZE = (5.0, 2.8)
"""Inches of a panel: letters of 9 points stay legible where it is as wide as a telephone."""
LEGEND_POINTS = 8.5
LEGEND_LETTERS = 56
"""Letters of a legend's line, with 6 for each handle."""
FEW_POINTS = 12
"""Up to so many points a curve shows each as a dot; with more they would run together."""
MOST_BARS = 80
"""Up to so many steps each has a bar, and curves are thick."""
PHASES = dict(zip(("rollout", "plan", "log_probs", "advantages", "update", "weights"), COLOURS, strict=True))
NOT_PARTS = ("reward/mean", "reward/std", "reward/failures")
SAMPLE_COLUMNS = {
    "step": "n",
    "sample": "n",
    "tokens": "n",
    "seconds": "n",
    "reward": "n",
    "prompt": "t",
    "response": "t",
}
"""Columns of a table by format: n is a right-aligned number, t is a text in the letters of code."""
BALANCE_NOTE = (
    "All ranks wait for the heaviest micro-batch of a micro-step. Imbalance: how much longer the micro-steps of an "
    "update take than if no rank waited, by the cost model: in the given order, after Karmarkar-Karp alone (largest "
    "differencing over ranks and micro-batches, whatever caps say), and as planned, which is refined from there."
)
Draw = Callable[[Axes], None]
Panel = tuple[str, Draw]
"""A title, and a function that draws."""


@dataclass(frozen=True)
class Card:
    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """Charts under a title. charts: trusted `<svg>` elements. wide: use the page's full width."""

    title: str
    charts: Sequence[Markup]
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """columns: formats by name. rows: a text per column."""

    title: str
    note: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Line:
    metric: str
    label: str = ""
    colour: str = ""
    dashed: bool = False


def write_report(folder: Path) -> Path:
    """Write a run's report into its folder; return its path.

    Raises DataError for a folder without metrics, ConfigError if its config.yaml does not fit this version.
    """
    path = folder / FILE
    path.write_text(page(RunFolder(folder), load_recorded(folder / "config.yaml")), encoding="utf-8")
    return path


def page(run: RunFolder, config: TrainingConfig) -> str:
    """Return the page as HTML."""
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
    if after and config.policy.data_parallel > 1:
        note = f"{_mean(before):.1%} as given"
        if alone := run.curve("balance/imbalance_karmarkar_karp/micro_steps").values:
            note += f", {_mean(alone):.2%} Karmarkar-Karp"
        found.append(Card("imbalance, mean", f"{_mean(after):.2%}", note))
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _sections(run: RunFolder, config: TrainingConfig) -> list[Section]:
    """Return every picture for which the run has data."""
    panels = learning(run)
    title = ("Reward" if isinstance(config, Config) else "Loss") + " and validation" * (len(panels) > 1)
    sections = [Section(title, _charts(panels))]
    if not run.lengths:
        return sections
    sections.append(Section("Lengths", _charts(_lengths(run))))
    seconds = ("Where the time of a step goes", lambda axes: _stacked_phases(axes, run))
    if config.policy.data_parallel == 1:  # nobody waits for anybody
        sections.append(Section("Time", _charts([seconds])))
    else:
        sections.append(Section("Balance and time", _charts([_imbalance(run), seconds]), BALANCE_NOTE))
    return [*sections, *who_computes_when(run), Section("Policy", _charts(policy(run)))]


def who_computes_when(run: RunFolder) -> list[Section]:
    """Compare the last step's plan with the given order, by the run's planner inputs.

    Time 1 is the plan's without waiting. Empty for one rank, or without a recorded plan.
    """
    try:
        record = run_step(run.path)
        arguments = recorded_arguments(record)
        if arguments.get("ranks", 1) == 1:
            return []
        changes: tuple[dict[str, Any], ...] = ({"algorithm": "none", "order": None}, {})
        given, plan = (plan_batch(record["lengths"], **{**arguments, **each}) for each in changes)
    except BalancingError:
        return []  # the given order cannot keep the caps or counts that our plan keeps
    grids = {"in the given order": predicted_grids(given), "as planned": predicted_grids(plan)}
    ideal = ideal_time(grids["as planned"])
    picture = svg_of(figure_of([chart_of_ranks(title, each, ideal) for title, each in grids.items()]))
    note = f"Update of step {record['step']}. {explain(plan)}"
    return [Section("Who computes when", [Markup(picture)], note, wide=True)]


def _charts(panels: Iterable[Panel]) -> list[Markup]:
    return [Markup(_svg(*panel)) for panel in panels]


def _svg(title: str, draw: Draw) -> str:
    """Draw one picture per panel; a page places two side by side, or stacks them on a narrow screen."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    with matplotlib.rc_context({"text.parse_math": False}):
        draw(axes)
        _dress(axes, title)
        return svg_of(figure)


def learning(run: RunFolder) -> list[Panel]:
    """Plot the reward with its parts, or the loss, per step; then validation, if any."""
    validation = [Line(name, name.removeprefix("validation/")) for name in run.names if name.startswith("validation/")]
    panels = [_curves(run, "Validation", validation)] if validation else []
    if "reward/mean" not in run.names:
        return [_curves(run, "Loss in training", [Line("policy/loss")]), *panels]
    parts = [name for name in run.names if name.startswith("reward/") and name not in NOT_PARTS]
    lines = [Line("reward/mean", "reward"), *(Line(name, name.removeprefix("reward/")) for name in parts)]
    return [_curves(run, "Reward in training, mean of a step", lines), *panels]


def policy(run: RunFolder) -> list[Panel]:
    """Plot entropy and gradient norm, and sample age unless it is always 0."""
    panels = [
        _curves(run, "Entropy of the policy", [Line("policy/entropy", colour=VIOLET)]),
        _curves(run, "Gradient norm, before clipping", [Line("policy/grad_norm", colour=AMBER)]),
    ]
    ages = [Line("rollout/staleness_mean", "mean", BLUE), Line("rollout/staleness_max", "max", GREY)]
    old = any(run.curve("rollout/staleness_max").values)
    return panels + ([_curves(run, "Age of samples, versions", ages, from_zero=True)] if old else [])


def _imbalance(run: RunFolder) -> Panel:
    lines = [
        Line("balance/imbalance_before/micro_steps", "as given", ROSE, dashed=True),
        Line("balance/imbalance_karmarkar_karp/micro_steps", "Karmarkar-Karp alone", AMBER, dashed=True),
        Line("balance/imbalance/micro_steps", "as planned", GREEN),
    ]
    return _curves(run, "Imbalance of micro-steps", lines, percent=True, from_zero=True)


def _curves(
    run: RunFolder, title: str, lines: Sequence[Line], *, percent: bool = False, from_zero: bool = False
) -> Panel:
    """Return a panel with one line per metric, up to a readable number. percent: values are shares."""

    def draw(axes: Axes) -> None:
        for line, colour in zip(lines, COLOURS, strict=False):
            curve = run.curve(line.metric)
            style: dict[str, Any] = {"linestyle": "--" if line.dashed else "-", "label": line.label}
            style |= {"linewidth": 1.8 if len(curve.steps) <= MOST_BARS else 1.0, "marker": _marker(len(curve.steps))}
            axes.plot(curve.steps, curve.values, color=line.colour or colour, markersize=3.5, **style)
        if percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        if from_zero:
            axes.set_ylim(bottom=0)
        _steps_below(axes)

    return title, draw


def _lengths(run: RunFolder) -> list[Panel]:
    """Plot lengths over the steps, and their distribution in the first and last."""
    first, last = min(run.lengths), max(run.lengths)

    def over_steps(axes: Axes) -> None:
        steps = np.array(sorted(run.lengths), float)
        quartiles = np.array([np.percentile(run.lengths[int(step)], [0, 25, 50, 75, 100]) for step in steps]).T
        if len(steps) == 1:  # a band needs a width
            steps, quartiles = np.array([first - 0.4, first + 0.4]), np.repeat(quartiles, 2, axis=1)
        low, quarter, median, three, high = quartiles
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.15, linewidth=0, label="shortest to longest")
        axes.fill_between(steps, quarter, three, color=BLUE, alpha=0.3, linewidth=0, label="middle half")
        axes.plot(steps, median, color=BLUE, linewidth=1.8, label="median", marker=_marker(len(steps)), markersize=3.5)
        axes.set_ylabel("tokens", color=INK)
        axes.set_ylim(bottom=0)
        _steps_below(axes)

    def histogram(axes: Axes) -> None:
        edges = np.histogram_bin_edges(np.concatenate([run.lengths[first], run.lengths[last]]), bins=24).tolist()
        axes.hist(run.lengths[first], bins=edges, color=GREY, label=f"step {first}", alpha=0.45)
        if last != first:
            axes.hist(run.lengths[last], edges, color=BLUE, label=f"step {last}", histtype="step", linewidth=1.8)
        axes.set_xlabel("tokens of a sequence", color=INK)
        axes.set_ylabel("sequences", color=INK)

    return [("Sequence length over steps", over_steps), ("Sequence lengths, first and last step", histogram)]


def _stacked_phases(axes: Axes, run: RunFolder) -> None:
    """Stack the seconds of the phases; the rest of a step stays white."""
    whole = run.curve("time/step_s")
    curves = {name: run.curve(f"time/{name}_s") for name in PHASES if f"time/{name}_s" in run.names}
    by_step = {name: dict(zip(curve.steps, curve.values, strict=True)) for name, curve in curves.items()}
    names, seconds = list(curves), [[found.get(step, 0.0) for step in whole.steps] for found in by_step.values()]
    labels, colours = [name.replace("_", "-") for name in names], [PHASES[name] for name in names]
    if len(whole.steps) > MOST_BARS:
        axes.stackplot(whole.steps, seconds, labels=labels, colors=colours, alpha=0.85, linewidth=0)
    else:
        bottoms = np.cumsum([[0.0] * len(whole.steps), *seconds], axis=0)
        for values, bottom, label, colour in zip(seconds, bottoms[:-1], labels, colours, strict=True):
            axes.bar(whole.steps, values, bottom=bottom, label=label, color=colour, alpha=0.85, width=0.75)
    axes.set_ylabel("seconds", color=INK)
    # The first step compiles; it would flatten all that follow.
    if len(whole.values) > 2:
        axes.set_ylim(0, 1.15 * max(whole.values[1:]))
    _steps_below(axes)


def _marker(points: int) -> str:
    return "o" if points <= FEW_POINTS else ""


def _steps_below(axes: Axes) -> None:
    axes.set_xlabel("step", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    low, high = axes.get_xlim()
    if high - low < 1.0:  # one step
        axes.set_xlim((low + high) / 2 - 0.5, (low + high) / 2 + 0.5)


def _dress(axes: Axes, title: str) -> None:
    """Add a title and, below it, the legend, where it covers nothing."""
    labels = axes.get_legend_handles_labels()[1]
    lines = 0
    if labels:
        widths = [len(label) + 6 for label in labels]
        columns = len(labels) if sum(widths) <= LEGEND_LETTERS else max(1, LEGEND_LETTERS // max(widths))
        lines = math.ceil(len(labels) / columns)
        style: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "borderaxespad": 0.0}
        style |= {"ncols": columns, "columnspacing": 1.2, "handlelength": 1.4, "handletextpad": 0.5}
        axes.legend(fontsize=LEGEND_POINTS, labelcolor=INK, frameon=False, **style)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8 + 1.75 * LEGEND_POINTS * lines)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.8)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(GREY)


def _slowest(run: RunFolder) -> Table:
    note = "By the seconds from the engine's receipt of the request to its last token; among the recorded samples."
    return Table("Slowest samples", note, SAMPLE_COLUMNS, _sample_rows(run.samples, "seconds"))


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
            *_texts(row),
        ]
        for row in chosen
    ]


def _validation(run: RunFolder) -> Table:
    """Return the worst and the best held-out responses, by reward."""
    step, rows = run.last_validation
    ordered = sorted(rows, key=_reward)
    half = SHOWN_SAMPLES // 2
    chosen = ordered if len(ordered) <= SHOWN_SAMPLES else ordered[:half] + ordered[-half:]
    note = f"Validation at step {step}: {len(chosen)} of {counted(len(rows), 'response')}, "
    note += "the lowest and the highest rewards."
    columns = {name: SAMPLE_COLUMNS[name] for name in ("prompt", "response", "reward")}
    return Table("Held-out responses", note, columns, [[*_texts(row), f"{_reward(row):.3f}"] for row in chosen])


def _texts(row: Row) -> list[str]:
    return [redacted(shortened(str(row.get(name, "")), TEXT)) for name in ("prompt", "response")]


def _reward(row: Row) -> float:
    return float("-inf") if row["reward"] is None else float(row["reward"])
