"""The charts of a run's report, each an inline `<svg>` that follows the page's light or dark colours.

RunFolder --curves--> Panel, Panel, ... --svg--> text of one element        lengths --plan again--> Gantt (balancing)
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from balancing import BalancingError, CostModel, Plan, plan_batch
from balancing.analysis.gantt import INK, Chart, themed, to_svg
from balancing.analysis.run_plan import PREFIXES
from balancing.analysis.statistics import ideal_time, predicted_grids
from controller.config import TrainingConfig
from controller.observability.run_folder import Curve, RunFolder
from controller.planner import draw_mini_batches, plan_arguments

BLUE, GREEN, AMBER, ROSE, VIOLET, GREY = "#2f7fb8", "#3a9679", "#d9902f", "#c2566a", "#8069b0", "#7d8491"
COLOURS = (BLUE, GREEN, AMBER, ROSE, VIOLET, GREY)
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
Draw = Callable[[Axes], None]


@dataclass(frozen=True)
class Line:
    label: str
    curve: Curve
    colour: str
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One set of axes with several lines. percent: values are shares."""

    title: str
    lines: Sequence[Line]
    percent: bool = False
    from_zero: bool = False


def svg(panel: Panel | tuple[str, Draw]) -> str:
    """A panel as a picture of its own, so that a page sets two beside each other or, on a narrow screen, one below the
    other; a panel may also be a title and what draws it."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "text.parse_math": False}):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        title, draw = panel if isinstance(panel, tuple) else (panel.title, _drawing(panel))
        draw(axes)
        _dress(axes, title)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return themed(buffer.getvalue())


def learning(run: RunFolder) -> list[Panel]:
    """Reward or loss of every step, with validation."""
    scores = [name for name in run.names if name.startswith("validation/")]
    validation = [Panel("Validation", _lines(run, scores, "validation/", COLOURS))] if scores else []
    if "reward/mean" in run.names:
        return [_rewards(run), *validation]
    return [Panel("Loss in training", [Line("", run.curve("policy/loss"), BLUE)]), *validation]


def _rewards(run: RunFolder) -> Panel:
    """Reward of every step, with its parts."""
    parts = [name for name in run.names if name.startswith("reward/") and name not in NOT_PARTS]
    training = [Line("reward", run.curve("reward/mean"), BLUE)]
    training += _lines(run, parts, "reward/", COLOURS[1:])
    return Panel("Reward in training, mean of a step", training)


NOT_PARTS = ("reward/mean", "reward/std", "reward/failures")
MOST_LINES = 6


def _lines(run: RunFolder, names: Sequence[str], prefix: str, colours: Sequence[str]) -> list[Line]:
    """One line a metric, as many as can be told apart."""
    return [
        Line(name.removeprefix(prefix), run.curve(name), colour)
        for name, colour in zip(names[:MOST_LINES], colours, strict=False)
    ]


def lengths(run: RunFolder) -> list[tuple[str, Draw]]:
    """Distribution of lengths over the steps, and in the first and the last; empty if none were recorded."""
    if not run.lengths:
        return []
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
        _legend(axes)

    def histogram(axes: Axes) -> None:
        edges = np.histogram_bin_edges(np.concatenate([run.lengths[first], run.lengths[last]]), bins=24)
        for step, colour, filled in ((first, GREY, True), (last, BLUE, False)):
            style = {"alpha": 0.45} if filled else {"histtype": "step", "linewidth": 1.8}
            if filled or last != first:
                axes.hist(run.lengths[step], bins=edges.tolist(), color=colour, label=f"step {step}", **style)
        axes.set_xlabel("tokens of a sequence", color=INK)
        axes.set_ylabel("sequences", color=INK)
        _legend(axes)

    return [("Sequence length over steps", over_steps), ("Sequence lengths, first and last step", histogram)]


def time(run: RunFolder) -> tuple[str, Draw]:
    """The time of a step by phase."""
    return "Where the time of a step goes", lambda axes: _stacked_phases(axes, run)


def imbalance(run: RunFolder) -> Panel:
    """Imbalance in the given order, after Karmarkar-Karp and as planned."""
    whens = ("_before", "_karmarkar_karp", "")
    before, alone, after = (run.curve(f"balance/imbalance{when}/micro_steps") for when in whens)
    return Panel(
        "Imbalance of micro-steps",
        [
            Line("as given", before, ROSE, dashed=True),
            Line("Karmarkar-Karp alone", alone, AMBER, dashed=True),
            Line("as planned", after, GREEN),
        ],
        percent=True,
        from_zero=True,
    )


def policy(run: RunFolder) -> list[Panel]:
    """Entropy and gradient norm of the policy, and the age of its samples where that is not 0 in all steps."""
    shown = (("Entropy of the policy", "entropy", VIOLET), ("Gradient norm, before clipping", "grad_norm", AMBER))
    panels = [Panel(title, [Line("", run.curve(f"policy/{name}"), colour)]) for title, name, colour in shown]
    ages = [
        Line(name, run.curve(f"rollout/staleness_{name}"), colour) for name, colour in (("mean", BLUE), ("max", GREY))
    ]
    return panels + ([Panel("Age of samples, versions", ages, from_zero=True)] if any(ages[-1].curve.values) else [])


def gantt(run: RunFolder, config: TrainingConfig) -> tuple[int, str] | None:
    """The last step and its Gantt charts, in the given order and as planned; None where there is nothing to compare.

    Time 1 is that of the plan if no rank ever waited. The plan, with several epochs the first one's, is made again from
    the recorded lengths, with the settings, the seed and the costs of the run.
    """
    if not run.lengths or config.policy.ranks == 1:
        return None
    step = max(run.lengths)
    try:
        plans = [_plan(run, config, step, algorithm) for algorithm in ("none", config.balance.algorithm)]
    except BalancingError:
        return None  # the given order cannot keep the caps or counts that our plan keeps
    charts = [
        Chart(title, predicted_grids(plan))
        for title, plan in zip(("in the given order", "as planned"), plans, strict=True)
    ]
    return step, to_svg(charts, ideal_time(charts[-1].grids))


def _plan(run: RunFolder, config: TrainingConfig, step: int, algorithm: str) -> Plan:
    found, columns = run.lengths[step], run.columns[step]
    groups = np.array(columns["groups"]) if config.mini_batches_by == "group" else None
    prefixes = {name: column for name, column in columns.items() if name in PREFIXES}
    return plan_batch(
        found,
        mini_batches=draw_mini_batches(len(found), config.mini_batches, config.run.seed, step, groups=groups),
        cost_model=CostModel(*run.costs.get(step, (1.0, 0.0))),
        **plan_arguments(config, "policy.update", prefixes) | {"algorithm": algorithm},
    )


def _drawing(panel: Panel) -> Draw:
    def draw(axes: Axes) -> None:
        for line in panel.lines:
            axes.plot(
                line.curve.steps,
                line.curve.values,
                color=line.colour,
                linewidth=1.8 if len(line.curve.steps) <= MOST_BARS else 1.0,
                linestyle="--" if line.dashed else "-",
                marker=_marker(len(line.curve.steps)),
                markersize=3.5,
                label=line.label,
            )
        if panel.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        if panel.from_zero:
            axes.set_ylim(bottom=0)
        _steps_below(axes)
        if any(line.label for line in panel.lines):
            _legend(axes)

    return draw


def _stacked_phases(axes: Axes, run: RunFolder) -> None:
    """Seconds of the phases, one upon the other; what the step took beyond them is left white."""
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
    _legend(axes)


def _marker(points: int) -> str:
    return "o" if points <= FEW_POINTS else ""


def _steps_below(axes: Axes) -> None:
    axes.set_xlabel("step", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    low, high = axes.get_xlim()
    if high - low < 1.0:  # one step
        axes.set_xlim((low + high) / 2 - 0.5, (low + high) / 2 + 0.5)


def _legend(axes: Axes) -> None:
    """In lines of its own between title and axes, where it covers nothing; none where nothing has a label."""
    labels = axes.get_legend_handles_labels()[1]
    if not labels:
        return
    style = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "borderaxespad": 0.0, "frameon": False}
    style |= {"ncols": _columns(labels), "columnspacing": 1.2, "handlelength": 1.4, "handletextpad": 0.5}
    axes.legend(fontsize=LEGEND_POINTS, labelcolor=INK, **style)  # type: ignore[call-overload]


def _columns(labels: Sequence[str]) -> int:
    """As many of a legend's labels as fit beside each other."""
    widths = [len(label) + 6 for label in labels]
    return len(labels) if sum(widths) <= LEGEND_LETTERS else max(1, LEGEND_LETTERS // max(widths))


def _dress(axes: Axes, title: str) -> None:
    labels = axes.get_legend_handles_labels()[1]
    lines = math.ceil(len(labels) / _columns(labels)) if labels else 0
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8 + 1.75 * LEGEND_POINTS * lines)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.8)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(GREY)
