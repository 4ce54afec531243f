"""Write a run's report: one page, `runs/NAME/report.html`, that needs no network.

    RunFolder --> charts (matplotlib, as SVG), cards, tables --> Jinja template --> report.html

The template escapes all texts of models and data, and inserts only our own charts unescaped. The content
security policy forbids scripts and requests: images are within the page. Secrets are masked.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
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
from controller.config.training import count_noun
from controller.observability.failures import cause_of
from controller.observability.health import warnings
from controller.observability.metric_table import spec_of
from controller.observability.report_tables import (
    TEXT,
    certificate_table,
    sample_tables,
    session_trees,
)
from controller.observability.run_folder import Row, RunFolder, check_run_folder
from controller.observability.shown_text import redact, shorten

FILE = "report.html"
BLUE, GREEN, AMBER, ROSE, VIOLET, GREY = (
    "#2f7fb8",
    "#3a9679",
    "#d9902f",
    "#c2566a",
    "#8069b0",
    "#7d8491",
)
COLOURS = (BLUE, GREEN, AMBER, ROSE, VIOLET, GREY)
"""Maximum number of distinguishable lines in a panel."""
SIZE = (5.0, 2.8)
"""Inches of a panel: letters of 9 points stay legible on a telephone."""
LEGEND_POINTS = 8.5
LEGEND_LETTERS = 56
"""Letters of a legend's line, with 6 for each handle."""
FEW_POINTS = 12
"""Maximum number of points of a curve that shows each as a dot."""
MOST_BARS = 80
"""Maximum number of steps that each have a bar, with thick curves."""
STYLE: Any = {
    "text.parse_math": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GREY,
    "grid.alpha": 0.2,
    "lines.linewidth": 1.8,
    "lines.markersize": 3.5,
    **{
        f"{axis}tick.{part}": value
        for axis in "xy"
        for part, value in (("color", INK), ("labelsize", 9))
    },
    "legend.borderaxespad": 0.0,
    "legend.columnspacing": 1.2,
    "legend.fontsize": LEGEND_POINTS,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.handletextpad": 0.5,
    "legend.labelcolor": INK,
}
PHASES = dict(
    zip(
        ("rollout", "plan", "log_probs", "advantages", "update", "weights"),
        COLOURS,
        strict=True,
    )
)
WHEN = ("_before", "_karmarkar_karp", "")
NOT_PARTS = ("reward/mean", "reward/std", "reward/failures")
BALANCE_NOTE = (
    "All ranks wait for the heaviest micro-batch of a micro-step. Imbalance: how much longer the "
    "micro-steps of an update take than if no rank waited, by the cost model: in the given order, after "
    "Karmarkar-Karp alone (largest differencing over ranks and micro-batches, without caps), and as "
    "planned, which is refined from there."
)
Draw = Callable[[Axes], None]
Panel = tuple[str, Draw]
"""A title, and a function that draws."""


@dataclass(frozen=True)
class Section:
    """Charts under a title. charts: trusted `<svg>` elements. wide: use the page's full width."""

    title: str
    charts: Sequence[Markup]
    note: str = ""
    wide: bool = False


def write_report(folder: Path) -> Path:
    """Write a run's report into its folder, and return its path.

    Raises DataError for a folder without metrics, ConfigError if its config.yaml does not fit this version.
    """
    check_run_folder(folder)
    run = RunFolder(folder)
    config = load_recorded(folder / "config.yaml")
    loader = PackageLoader("controller.observability", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = environment.get_template(FILE).render(
        name=redact(config.run.name),
        lead=redact(config.headline),
        cards=_cards(run, config),
        warnings=[*warnings(run.metrics, samples=config.samples), *failure_lines(run)],
        sections=_sections(run, config),
        tables=[
            table
            for table in (*sample_tables(run), *certificate_table(config))
            if table.rows
        ],
        sessions=session_trees(run),
        command="`--settings` behind the command explains every key",
        config=redact((folder / "config.yaml").read_text(encoding="utf-8")),
    )
    (folder / FILE).write_text(page, encoding="utf-8")
    return folder / FILE


def failure_lines(run: RunFolder) -> list[str]:
    """Count a run's drops, retries and failures by kind and cause, with the first one of each."""
    by_cause: dict[tuple[str, str], list[Row]] = {}
    for row in run.failures:
        by_cause.setdefault((str(row["kind"]), cause_of(str(row["first"]))), []).append(row)
    lines = []
    for (kind, _), rows in by_cause.items():
        count = sum(row["count"] for row in rows)
        steps = count_noun(len({row["step"] for row in rows}), "step")
        first = shorten(str(rows[0]["first"]), TEXT)
        lines.append(
            redact(
                f"{kind}: {count} in {steps}, the first at step {rows[0]['step']}: {first}"
            )
        )
    return lines


def _cards(run: RunFolder, config: TrainingConfig) -> list[tuple[str, str, str]]:
    """Return (label, value, note) of the run's main numbers."""
    cards = [
        ("steps", f"{run.metrics[-1]['step']:,}", f"{len(run.lengths)} with an update")
    ]
    for label, name in (
        ("reward", "reward/mean"),
        ("validation reward", "validation/reward"),
        ("loss", "policy/loss"),
    ):
        if values := run.curve(name).values:
            change = (
                f"{values[-1] - values[0]:+.3f} since the first" if len(values) > 1 else ""
            )
            cards.append((label, f"{values[-1]:.3f}", change))
    speeds = (
        ("seconds a step", "time/step_s", ".2f"),
        ("tokens/s", "throughput/tokens_per_s", ",.0f"),
    )
    for label, name, form in speeds:
        if values := run.curve(name).values:
            cards.append(
                (
                    label,
                    f"{sorted(values)[len(values) // 2]:{form}}",
                    "median" if len(values) > 1 else "",
                )
            )
    given_order, alone, planned = (
        run.curve(f"balance/imbalance{when}/micro_steps").values for when in WHEN
    )
    if planned and config.planned_ranks > 1:
        note = f"{fmean(given_order):.1%} as given" + (
            f", {fmean(alone):.2%} Karmarkar-Karp" if alone else ""
        )
        cards.append(("imbalance, mean", f"{fmean(planned):.2%}", note))
    return cards


def _sections(run: RunFolder, config: TrainingConfig) -> list[Section]:
    panels = learning(run)
    title = ("Reward" if isinstance(config, Config) else "Loss") + " and validation" * (
        len(panels) > 1
    )
    sections = [Section(title, _charts(panels))]
    if not run.lengths:
        return sections
    sections.append(Section("Lengths", _charts(_lengths(run))))
    seconds = ("Where the time of a step goes", lambda axes: _stack_phases(axes, run))
    if config.planned_ranks == 1:  # no rank waits
        sections.append(Section("Time", _charts([seconds])))
    else:
        sections.append(
            Section("Balance and time", _charts([_imbalance(run), seconds]), BALANCE_NOTE)
        )
    return [*sections, *who_computes_when(run), Section("Policy", _charts(policy(run)))]


def who_computes_when(run: RunFolder) -> list[Section]:
    """Compare the last step's plan with the given order, by the run's planner inputs.

    Time 1 is the plan's without waiting. Returns nothing for one rank, or without a recorded plan.
    """
    try:
        record = run_step(run.path)
        arguments = recorded_arguments(record)
        if arguments.get("ranks", 1) == 1:
            return []
        changes: tuple[dict[str, Any], ...] = ({"algorithm": "none", "order": None}, {})
        given_plan, plan = (
            plan_batch(record["lengths"], **{**arguments, **each}) for each in changes
        )
    except BalancingError:
        return []  # the given order would exceed caps or counts
    grids = {
        "in the given order": predicted_grids(given_plan),
        "as planned": predicted_grids(plan),
    }
    ideal = ideal_time(grids["as planned"])
    picture = svg_of(
        figure_of([chart_of_ranks(title, each, ideal) for title, each in grids.items()])
    )
    note = f"Update of step {record['step']}. {explain(plan)}"
    return [Section("Who computes when", [Markup(picture)], note, wide=True)]


def _charts(panels: Iterable[Panel]) -> list[Markup]:
    """Draw one picture per panel, which a page places side by side, or stacks on a narrow screen."""
    return [Markup(_svg(title, draw)) for title, draw in panels]


def _svg(title: str, draw: Draw) -> str:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        # The legend stands below the title, where it covers nothing.
        lines = 0
        if labels := axes.get_legend_handles_labels()[1]:
            widths = [len(label) + 6 for label in labels]
            columns = (
                len(labels)
                if sum(widths) <= LEGEND_LETTERS
                else max(1, LEGEND_LETTERS // max(widths))
            )
            lines = math.ceil(len(labels) / columns)
            axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=columns)
        axes.set_title(title, pad=8 + 1.75 * LEGEND_POINTS * lines)
        return svg_of(figure)


def learning(run: RunFolder) -> list[Panel]:
    """Plot the reward with its parts, or the loss, per step, then validation, if any."""
    held_out = {
        name: name.removeprefix("validation/")
        for name in run.names
        if name.startswith("validation/")
    }
    panels = [_curves(run, "Validation", held_out)] if held_out else []
    if "reward/mean" not in run.names:
        return [_curves(run, "Loss in training", {"policy/loss": ""}), *panels]
    parts = [
        name for name in run.names if name.startswith("reward/") and name not in NOT_PARTS
    ]
    lines = {"reward/mean": "reward"} | {
        name: name.removeprefix("reward/") for name in parts
    }
    return [_curves(run, "Reward in training, mean of a step", lines), *panels]


def policy(run: RunFolder) -> list[Panel]:
    """Plot entropy and gradient norm, and sample age unless it is always 0."""
    panels = [
        _curves(run, "Entropy of the policy", {"policy/entropy": ""}, [VIOLET]),
        _curves(run, "Gradient norm, before clipping", {"policy/grad_norm": ""}, [AMBER]),
    ]
    if any(run.curve("rollout/staleness_max").values):
        ages = {"rollout/staleness_mean": "mean", "rollout/staleness_max": "max"}
        panels.append(
            _curves(run, "Age of samples, versions", ages, [BLUE, GREY], from_zero=True)
        )
    return panels


def _imbalance(run: RunFolder) -> Panel:
    labels = ("as given", "Karmarkar-Karp alone", "as planned")
    lines = {
        f"balance/imbalance{when}/micro_steps": label
        for when, label in zip(WHEN, labels, strict=True)
    }
    return _curves(
        run,
        "Imbalance of micro-steps",
        lines,
        [ROSE, AMBER, GREEN],
        dashed=2,
        from_zero=True,
    )


def _curves(
    run: RunFolder,
    title: str,
    lines: Mapping[str, str],
    colours: Sequence[str] = COLOURS,
    *,
    dashed: int = 0,
    from_zero: bool = False,
) -> Panel:
    """Return a panel with one line per metric, up to a readable number. lines: label by metric. dashed: first
    lines.
    """

    def draw(axes: Axes) -> None:
        for number, ((metric, label), colour) in enumerate(
            zip(lines.items(), colours, strict=False)
        ):
            curve = run.curve(metric)
            style: dict[str, Any] = {
                "linestyle": "--" if number < dashed else "-",
                "marker": _marker(len(curve.steps)),
            }
            style |= {} if len(curve.steps) <= MOST_BARS else {"linewidth": 1.0}
            axes.plot(curve.steps, curve.values, color=colour, label=label, **style)
        if (spec := spec_of(metric)) and spec[0].unit == "share":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        if from_zero:
            axes.set_ylim(bottom=0)
        _steps_below(axes)

    return title, draw


def _lengths(run: RunFolder) -> list[Panel]:
    """Plot lengths over the steps, and their distribution in the first and last."""
    first = min(run.lengths)
    last = max(run.lengths)

    def over_steps(axes: Axes) -> None:
        steps = np.array(sorted(run.lengths), float)
        quartiles = np.array(
            [np.percentile(run.lengths[int(step)], [0, 25, 50, 75, 100]) for step in steps]
        ).T
        if len(steps) == 1:  # a band needs a width
            steps = np.array([first - 0.4, first + 0.4])
            quartiles = np.repeat(quartiles, 2, axis=1)
        low, quarter, median, three, high = quartiles
        axes.fill_between(
            steps,
            low,
            high,
            color=BLUE,
            alpha=0.15,
            linewidth=0,
            label="shortest to longest",
        )
        axes.fill_between(
            steps, quarter, three, color=BLUE, alpha=0.3, linewidth=0, label="middle half"
        )
        axes.plot(steps, median, color=BLUE, label="median", marker=_marker(len(steps)))
        axes.set_ylabel("tokens")
        axes.set_ylim(bottom=0)
        _steps_below(axes)

    def histogram(axes: Axes) -> None:
        edges = np.histogram_bin_edges(
            np.concatenate([run.lengths[first], run.lengths[last]]), bins=24
        ).tolist()
        axes.hist(
            run.lengths[first], bins=edges, color=GREY, label=f"step {first}", alpha=0.45
        )
        if last != first:
            axes.hist(
                run.lengths[last],
                edges,
                color=BLUE,
                label=f"step {last}",
                histtype="step",
                linewidth=1.8,
            )
        axes.set_xlabel("tokens of a sequence")
        axes.set_ylabel("sequences")

    return [
        ("Sequence length over steps", over_steps),
        ("Sequence lengths, first and last step", histogram),
    ]


def _stack_phases(axes: Axes, run: RunFolder) -> None:
    """Stack the seconds of the phases, and leave the rest of a step white."""
    step_curve = run.curve("time/step_s")
    names = [name for name in PHASES if f"time/{name}_s" in run.names]
    seconds = []
    for name in names:
        curve = run.curve(f"time/{name}_s")
        by_step = dict(zip(curve.steps, curve.values, strict=True))
        seconds.append([by_step.get(step, 0.0) for step in step_curve.steps])
    labels = [name.replace("_", "-") for name in names]
    colours = [PHASES[name] for name in names]
    if len(step_curve.steps) > MOST_BARS:
        axes.stackplot(
            step_curve.steps,
            seconds,
            labels=labels,
            colors=colours,
            alpha=0.85,
            linewidth=0,
        )
    else:
        bottoms = np.cumsum([[0.0] * len(step_curve.steps), *seconds], axis=0)
        for values, bottom, label, colour in zip(
            seconds, bottoms[:-1], labels, colours, strict=True
        ):
            axes.bar(
                step_curve.steps,
                values,
                bottom=bottom,
                label=label,
                color=colour,
                alpha=0.85,
                width=0.75,
            )
    axes.set_ylabel("seconds")
    # The first step compiles, and would flatten the others.
    if len(step_curve.values) > 2:
        axes.set_ylim(0, 1.15 * max(step_curve.values[1:]))
    _steps_below(axes)


def _marker(points: int) -> str:
    return "o" if points <= FEW_POINTS else ""


def _steps_below(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(
        MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
    )
    low, high = axes.get_xlim()
    if high - low < 1.0:  # one step
        axes.set_xlim((low + high) / 2 - 0.5, (low + high) / 2 + 0.5)
