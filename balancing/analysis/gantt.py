"""Gantt charts of micro-steps, which show when each rank computes and waits, as PNG or SVG.

time ->     0         1.0 = the time if no rank ever waited
rank 0      [ step 0   ][ step 1  ]....
rank 1      [ step 0       ][ step 1     ]      a gap is waiting
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from balancing.analysis.statistics import ideal_time, step_time

MINI_BATCH_COLOURS = ("#2f6690", "#3a9679", "#e3a857", "#b4656f", "#6d5a8d", "#7d8491")
"""Colours of mini-batches in turn; the micro-steps of a mini-batch alternate between two shades."""
WAITING = "#f3d9d6"
INK = "#22313f"
THEME = {INK: "var(--ink)", WAITING: "var(--waiting)", "#ffffff": "var(--paper)"}
"""Colours that a page's style sheet sets, so that charts follow its light or dark."""
DASHES = (0, (4, 3))
MOST_RANKS_APART = 24
"""White lines separate the ranks if there are at most this many."""
SHADE = 0.62
"""Opacity of the lighter shade."""


@dataclass(frozen=True)
class Chart:
    """One panel. grids: float64 [steps, ranks] for each mini-batch, the time of every micro-batch."""

    title: str
    grids: Sequence[NDArray[np.float64]]


def save_png(charts: Sequence[Chart], ideal: float, path: Path) -> None:
    """Write the panels, one above the other on one time axis in units of `ideal`; OSError if that fails."""
    _figure(charts, ideal).savefig(path, dpi=160)


def to_svg(charts: Sequence[Chart], ideal: float) -> str:
    """The same panels as an `<svg>` element for a page that sets the colours of `THEME`."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "balancing"}):
        buffer = io.StringIO()
        _figure(charts, ideal).savefig(buffer, format="svg", metadata={"Date": None})
    return themed(buffer.getvalue())


def themed(drawn: str) -> str:
    """The `<svg>` element alone, in the page's colours."""
    drawn = drawn[drawn.index("<svg") :]
    for colour, variable in THEME.items():
        drawn = re.sub(rf"{colour}\b", variable, drawn, flags=re.IGNORECASE)
    return drawn


def _figure(charts: Sequence[Chart], ideal: float) -> Figure:
    """The figure, whose height grows with the number of ranks up to a limit."""
    ranks = charts[0].grids[0].shape[1]
    tallest = 3.4 if len(charts) <= 2 else 2.2
    height = min(tallest, max(1.7, 0.13 * ranks + 0.9))
    figure = Figure(figsize=(11, height * len(charts) + 0.7), layout=ConstrainedLayoutEngine(h_pad=0.1))
    axes = figure.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0]
    for chart, panel in zip(charts, axes, strict=True):
        _draw(panel, chart, ideal)
    axes[0].set_xlim(0, 1.01 * max(step_time(chart.grids) for chart in charts) / ideal)
    axes[-1].set_xlabel("time  (1 = no rank ever waits)", color=INK)
    figure.legend(handles=_legend(len(charts[0].grids)), loc="outside lower center", ncols=9, frameon=False, fontsize=9)
    return figure


def _draw(panel: Axes, chart: Chart, ideal: float) -> None:
    """Draw one panel, with times in units of `ideal`."""
    start = 0.0
    ranks = chart.grids[0].shape[1]
    for number, grid in enumerate(chart.grids):
        colour = MINI_BATCH_COLOURS[number % len(MINI_BATCH_COLOURS)]
        for position, loads in enumerate(grid / ideal):
            end = start + loads.max()
            _bars(panel, np.full(ranks, start), start + loads, colour if position % 2 == 0 else _lighter(colour))
            _bars(panel, start + loads, np.full(ranks, end), WAITING)
            panel.axvline(end, color="white", linewidth=0.8)
            start = end
        panel.axvline(start, color=INK, linewidth=0.9)
    if ranks <= MOST_RANKS_APART:
        for rank in range(1, ranks):
            panel.axhline(rank - 0.5, color="white", linewidth=1.5)
    panel.axvline(1.0, color=INK, linewidth=1.0, linestyle=DASHES)
    _dress(panel, chart, start, ranks)


def _bars(panel: Axes, starts: NDArray[np.float64], ends: NDArray[np.float64], colour: str) -> None:
    """Draw a bar for each rank as a single outline, because many separate bars would make a page of megabytes."""
    edges = np.arange(len(starts) + 1) - 0.5
    panel.stairs(
        ends, edges, baseline=starts, orientation="horizontal", fill=True, color=colour, linewidth=0, antialiased=False
    )


def _lighter(colour: str) -> str:
    """The colour mixed with white."""
    red, green, blue = (1.0 - SHADE * (1.0 - channel) for channel in to_rgb(colour))
    return to_hex((red, green, blue))


def _dress(panel: Axes, chart: Chart, end: float, ranks: int) -> None:
    waiting = 1.0 - ideal_time(chart.grids) / step_time(chart.grids)
    panel.set_title(chart.title, loc="left", fontsize=11.5, fontweight="bold", color=INK)
    panel.set_title(f"{end:.3f} × ideal   ·   {waiting:.1%} of rank time waits", loc="right", fontsize=10, color=INK)
    panel.set_ylim(ranks - 0.5, -0.5)
    panel.set_yticks(sorted({0, ranks // 2, ranks - 1}) if ranks > 12 else range(ranks))
    panel.set_ylabel("rank", color=INK)
    panel.tick_params(colors=INK, labelsize=9)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color(INK)


def _legend(mini_batches: int) -> list[Artist]:
    shown = [
        Patch(facecolor=MINI_BATCH_COLOURS[number], label=f"mini-batch {number}")
        for number in range(min(mini_batches, len(MINI_BATCH_COLOURS)))
    ]
    ideal = Line2D([], [], color=INK, linewidth=1.0, linestyle=DASHES, label="ideal")
    return [*shown, Patch(facecolor=WAITING, label="waiting"), ideal]
