"""Gantt charts of pipelines: what every stage computes, and when it waits, as PNG or SVG.

time ->   0
stage 0   [F0][F1][F2]      [B0 ][F3][B1 ]      coloured by micro-batch, backward passes darker
stage 1       [F0][F1][B0 ][F2][B1 ]            a gap is the bubble
"""

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from balancing.analysis.gantt import INK, WAITING, themed
from balancing.analysis.pipeline_comparison import PipelineOutcome
from balancing.pipeline import Pipeline
from balancing.pipeline_time import Timeline, timeline

COLOURS = "viridis"
"""Colours of micro-batches, in the order of execution."""
BAR = 0.86
"""Height of a stage."""
FORWARD = 0.45
"""Opacity of forward passes."""


def save_pipeline_png(outcomes: Sequence[PipelineOutcome], pipeline: Pipeline, path: Path) -> None:
    """Write a panel for each outcome, on one time axis; OSError if that fails."""
    _figure(outcomes, pipeline).savefig(path, dpi=160)


def pipeline_svg(outcomes: Sequence[PipelineOutcome], pipeline: Pipeline) -> str:
    """The same panels as an `<svg>` element for a page that sets the colours of `gantt.THEME`."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "balancing"}):
        buffer = io.StringIO()
        _figure(outcomes, pipeline).savefig(buffer, format="svg", metadata={"Date": None})
    return themed(buffer.getvalue())


def _figure(outcomes: Sequence[PipelineOutcome], pipeline: Pipeline) -> Figure:
    height = min(3.4, 0.3 * pipeline.stages + 0.9)
    figure = Figure(figsize=(11, height * len(outcomes) + 0.7), layout=ConstrainedLayoutEngine(h_pad=0.1))
    axes = figure.subplots(len(outcomes), 1, sharex=True, squeeze=False)[:, 0]
    ideal = float(outcomes[-1].plan.workloads.sum()) / outcomes[-1].plan.ranks / pipeline.stages
    for outcome, panel in zip(outcomes, axes, strict=True):
        _draw(panel, outcome, pipeline, ideal)
    axes[0].set_xlim(0, 1.01 * max(1.0 + outcome.over_ideal for outcome in outcomes))
    axes[-1].set_xlabel("time  (1 = no stage and no rank ever waits)", color=INK)
    shown = [Patch(color=colormaps[COLOURS](0.4), alpha=FORWARD, label="forward")]
    shown += [Patch(color=colormaps[COLOURS](0.4), label="backward"), Patch(color=WAITING, label="bubble")]
    figure.legend(handles=shown, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _draw(panel: Axes, outcome: PipelineOutcome, pipeline: Pipeline, ideal: float) -> None:
    """Draw one panel, mini-batch after mini-batch, with times in units of `ideal`."""
    start = 0.0
    for times in outcome.plan.predicted_times():
        drawn = timeline(pipeline, times)
        end = start + float(drawn.ends.max()) / ideal
        panel.barh(range(pipeline.stages), end - start, BAR, left=start, color=WAITING, linewidth=0)
        _passes(panel, drawn, len(times), start, ideal)
        panel.axvline(end, color=INK, linewidth=0.9)
        start = end
    panel.set_title(outcome.name, loc="left", fontsize=11.5, fontweight="bold", color=INK)
    panel.set_title(f"{start:.3f} × ideal   ·   bubble {outcome.bubble:.1%}", loc="right", fontsize=10, color=INK)
    panel.set_ylim(pipeline.stages - 0.5, -0.5)
    panel.set_yticks(range(pipeline.stages))
    panel.set_ylabel("stage", color=INK)
    panel.tick_params(colors=INK, labelsize=9)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color(INK)


def _passes(panel: Axes, drawn: Timeline, micro_batches: int, start: float, ideal: float) -> None:
    colours = colormaps[COLOURS](drawn.passes.micro_batch / max(1, micro_batches - 1) * 0.9)
    colours[:, 3] = np.where(drawn.passes.forward == 1, FORWARD, 1.0)
    panel.barh(
        drawn.passes.stage,
        (drawn.ends - drawn.starts) / ideal,
        BAR,
        left=start + drawn.starts / ideal,
        color=colours,
        edgecolor="white",
        linewidth=0.3,
    )
