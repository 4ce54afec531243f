"""A picture of some minutes of a run under each of a few schedules."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from tests.benchmarks.schedule.rows import Row, compared, parts, windowed
from tests.benchmarks.schedule.simulator import Record, Workload

MINUTES = 15
ENGINES, TRAINER = "#9ecae1", "#08519c"


def draw(workload: Workload, path: Path) -> None:
    """The synchronous run, the drained overlap, and ours with S = 1 and 2, one above the other."""
    synchronous, drained, *_ = compared(workload)
    rows = [synchronous, drained, windowed(workload, 1, 0.3), windowed(workload, 2, 0.3)]
    figure, panels = pyplot.subplots(len(rows), figsize=(9, 6), sharex=True, layout="constrained")
    for row, panel in zip(rows, panels, strict=True):
        _draw_row(panel, row, row.run(workload, seed=0))
    panels[-1].set_xlabel("minutes")
    shown = [Patch(color=ENGINES, label="samples in the engines"), Patch(color=TRAINER, label="trainer busy")]
    figure.legend(handles=shown, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)


def _draw_row(axes: Axes, row: Row, record: Record) -> None:
    """Engines above, the trainer below, from the beginning of the steady part."""
    before, _, _ = parts(record)
    start, slots = before[-1].end, record.workload.engines * record.workload.slots
    times, decoding = zip(*record.decoding, strict=True)
    minutes = [(time - start) / 60 for time in times]
    axes.fill_between(minutes, [samples / slots for samples in decoding], step="post", color=ENGINES, linewidth=0)
    spans = [((step.start - start) / 60, (step.end - step.start) / 60) for step in record.steps]
    axes.broken_barh(spans, (-0.45, 0.35), color=TRAINER, linewidth=0)
    axes.set(xlim=(0, MINUTES), ylim=(-0.5, 1.05), yticks=(0, 1), yticklabels=("0", "full"))
    axes.set_title(row.name.strip("*"), loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
