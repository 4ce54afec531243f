"""Draw Gantt charts: when each rank, or each stage of a pipeline, computes and waits.

time ->     0         1.0 = the time if no rank ever waited
rank 0      [ step 0   ][ step 1  ]....         stage 0   [F0][F1][F2]      [B0 ][F3][B1 ]
rank 1      [ step 0       ][ step 1     ]      stage 1       [F0][F1][B0 ][F2][B1 ]          a gap is waiting
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from balancing.analysis.statistics import bubble, ideal_time, step_time
from balancing.basics.grouping import Floats
from balancing.pipelines.pipeline import Pipeline
from balancing.pipelines.pipeline_time import timeline
from balancing.plan import Plan

MINI_BATCH_COLOURS = ("#2f6690", "#3a9679", "#e3a857", "#b4656f", "#6d5a8d", "#7d8491")
"""Mini-batches take colours in turn. Their micro-steps alternate between two shades."""
MICRO_BATCH_COLOURS = colormaps["viridis"]
WAITING = "#f3d9d6"
INK = "#22313f"
THEME = {INK: "var(--ink)", WAITING: "var(--waiting)", "#ffffff": "var(--paper)"}
"""Colours that a page's style sheet sets, so that charts follow its light or dark theme."""
DASHES = (0, (4, 3))
MOST_RANKS_APART = 24
"""White lines separate at most so many ranks."""
SHADE, FORWARD = 0.62, 0.45
"""Opacity of the lighter shade, and of forward passes."""
BAR = 0.86
"""Height of a stage."""


@dataclass(frozen=True)
class Chart:
    """One panel of `rows` ranks or stages until time `end`. draw: adds the bars of computing."""

    title: str
    facts: str
    rows: int
    row_name: str
    end: float
    draw: Callable[[Axes], None]
    legend: Sequence[Patch | Line2D]


def chart_of_ranks(title: str, grids: Sequence[Floats], ideal: float) -> Chart:
    """Chart float64 [steps, ranks] per mini-batch, the time of every micro-batch. ideal: time 1
    on the axis.
    """
    ranks = grids[0].shape[1]
    end = step_time(grids) / ideal
    edges = np.arange(ranks + 1) - 0.5

    def draw(panel: Axes) -> None:
        start = 0.0
        for number, grid in enumerate(grids):
            colour = MINI_BATCH_COLOURS[number % len(MINI_BATCH_COLOURS)]
            for position, loads in enumerate(grid / ideal):
                shade = colour if position % 2 == 0 else _lighter(colour)
                style: dict[str, Any] = {
                    "color": shade,
                    "linewidth": 0,
                    "antialiased": False,
                }
                # One outline for all ranks, because many separate bars would make a page of megabytes.
                panel.stairs(
                    start + loads,
                    edges,
                    baseline=start,
                    orientation="horizontal",
                    fill=True,
                    **style,
                )
                start += loads.max()
                panel.axvline(start, color="white", linewidth=0.8)
            panel.axvline(start, color=INK, linewidth=0.9)
        for rank in range(1, ranks if ranks <= MOST_RANKS_APART else 1):
            panel.axhline(rank - 0.5, color="white", linewidth=1.5)
        panel.axvline(1.0, color=INK, linewidth=1.0, linestyle=DASHES)

    numbered_colours = enumerate(MINI_BATCH_COLOURS[: len(grids)])
    legend: list[Patch | Line2D] = [
        Patch(facecolor=colour, label=f"mini-batch {number}")
        for number, colour in numbered_colours
    ]
    legend += [Patch(facecolor=WAITING, label="waiting")]
    legend += [Line2D([], [], color=INK, linewidth=1.0, linestyle=DASHES, label="ideal")]
    waits = f"{1.0 - ideal_time(grids) / step_time(grids):.1%} of rank time waits"
    return Chart(title, waits, ranks, "rank", end, draw, legend)


def chart_of_stages(title: str, plan: Plan, pipeline: Pipeline, ideal: float) -> Chart:
    """Chart all passes of a plan on its pipeline, mini-batch after mini-batch. ideal: time 1 on the axis."""
    drawn = [timeline(pipeline, times) for times in plan.predicted_times()]
    ends = np.cumsum([mini_batch.ends.max() for mini_batch in drawn]) / ideal

    def draw(panel: Axes) -> None:
        for mini_batch, start, end in zip(drawn, [0.0, *ends[:-1]], ends, strict=True):
            passes = mini_batch.passes
            colours = MICRO_BATCH_COLOURS(
                passes.micro_batch / max(1, passes.micro_batch.max()) * 0.9
            )
            colours[:, 3] = np.where(passes.forward == 1, FORWARD, 1.0)
            lasted = (mini_batch.ends - mini_batch.starts) / ideal
            style = {"color": colours, "edgecolor": "white", "linewidth": 0.3}
            panel.barh(
                passes.stage, lasted, BAR, left=start + mini_batch.starts / ideal, **style
            )
            panel.axvline(end, color=INK, linewidth=0.9)

    colour = MICRO_BATCH_COLOURS(0.4)
    legend = [
        Patch(color=colour, alpha=FORWARD, label="forward"),
        Patch(color=colour, label="backward"),
    ]
    legend.append(Patch(color=WAITING, label="bubble"))
    return Chart(
        title,
        f"bubble {bubble(plan, pipeline):.1%}",
        pipeline.stages,
        "stage",
        float(ends[-1]),
        draw,
        legend,
    )


def figure_of(charts: Sequence[Chart]) -> Figure:
    """Draw the panels one above the other on one time axis. The height grows with the rows up to a limit."""
    height = min(3.4, max(1.7, 0.13 * charts[0].rows + 0.9))
    figure = Figure(
        figsize=(11, height * len(charts) + 0.7), layout=ConstrainedLayoutEngine(h_pad=0.1)
    )
    axes = figure.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0]
    for chart, panel in zip(charts, axes, strict=True):
        panel.barh(range(chart.rows), chart.end, 1.0, color=WAITING, linewidth=0)
        chart.draw(panel)
        panel.set_title(
            chart.title, loc="left", fontsize=11.5, fontweight="bold", color=INK
        )
        panel.set_title(
            f"{chart.end:.3f} × ideal   ·   {chart.facts}",
            loc="right",
            fontsize=10,
            color=INK,
        )
        panel.set_ylim(chart.rows - 0.5, -0.5)
        panel.set_yticks(
            sorted({0, chart.rows // 2, chart.rows - 1})
            if chart.rows > 12
            else range(chart.rows)
        )
        panel.set_ylabel(chart.row_name, color=INK)
        panel.tick_params(colors=INK, labelsize=9)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.spines["bottom"].set_color(INK)
    axes[0].set_xlim(0, 1.01 * max(chart.end for chart in charts))
    axes[-1].set_xlabel("time  (1 = nobody ever waits)", color=INK)
    figure.legend(
        handles=charts[0].legend,
        loc="outside lower center",
        ncols=9,
        frameon=False,
        fontsize=9,
    )
    return figure


def svg_of(figure: Figure) -> str:
    """Return an `<svg>` element for a page that sets the colours of `THEME`."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "balancing"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    drawn = buffer.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    for colour, variable in THEME.items():
        drawn = re.sub(rf"{colour}\b", variable, drawn, flags=re.IGNORECASE)
    return drawn


def _lighter(colour: str) -> str:
    red, green, blue = (1.0 - SHADE * (1.0 - channel) for channel in to_rgb(colour))
    return to_hex((red, green, blue))
