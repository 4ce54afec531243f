"""What the schedule buys: generation and training as events, under our schedule and under others.

    python -m tests.benchmarks.schedule [--seeds 5] [--output docs/schedule-benchmark.md] [--picture docs/schedule.png]

Nothing is generated and no clock is read: the same command writes the same page on every machine
(`simulator.py`).
"""

from pathlib import Path
from textwrap import fill

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from tests.benchmarks.balancing.table import Table
from tests.benchmarks.command import read_options, write_page
from tests.benchmarks.schedule.rows import (
    SYNCHRONOUS,
    Result,
    Row,
    compared,
    measured,
    parts,
    windowed,
)
from tests.benchmarks.schedule.simulator import Record, Workload

MINUTES = 15
ENGINES, TRAINER = "#9ecae1", "#08519c"

HEADER = """# Generation ahead of training

Made by `python -m tests.benchmarks.schedule --output docs/schedule-benchmark.md --picture docs/schedule.png`.

{described}

![When the trainer is busy, and how full the engines are](schedule.png)

"""
DESCRIBED = """This is a simulation. {engines} engines of {slots} samples decode one token of each in {a} + {c} x
samples seconds. The trainer processes {train_tokens_per_second:,.0f} tokens/s. A weight update takes
{update_seconds:.0f} s, in which both wait. A step has {prompts_per_step} groups of {samples}. Response lengths are
log-normal with median {median_length:,}, sigma {sigma} and at most {longest:,} tokens, and the same in every row.
Values are medians of {seeds} seeds. Our rows use the class of real runs (`controller/engines/staleness_schedule.py`).
The picture has the first minutes after step {skipped} of one seed."""
COMPARED = (
    "samples/s",
    "tokens/s",
    "trainer busy",
    "mean length, all",
    "mean length, steady",
    "99th percentile",
    "mean age",
    "oldest",
    "its bound",
    "groups discarded",
    "tokens wasted",
)
NOTE = """Speeds are relative to the synchronous run. They and the trainer's busy share cover the steady part: all
steps except the first and the last {skipped} of {steps}. Every run continues to its end, so that all {groups:,} prompts
are either trained or discarded. Mean and 99th percentile of the trained lengths are relative to all prompts, so they
are 1 if nothing is discarded. `steady` shows whether long responses are delayed until the end. It is the mean length
trained in the steady part, relative to the prompts from its oldest group to the oldest of the following step. The age
of a group is the number of weight versions between its admission and its use. The oldest is over all seeds. Tokens
wasted are a share of all decoded tokens."""


def filled(text: str, **values: object) -> str:
    """A paragraph of the page."""
    return fill(text.format(**values), 120, break_on_hyphens=False, break_long_words=False)


def cells(row: Row, result: Result, synchronous: Result) -> list[str]:
    """A line of the table of schedules."""
    return [
        row.name,
        f"{result.samples_per_second / synchronous.samples_per_second:.2f}x",
        f"{result.tokens_per_second / synchronous.tokens_per_second:.2f}x",
        f"{result.trainer_busy:.0%}",
        f"{result.mean_length:.3f}",
        f"{result.steady_length:.3f}",
        f"{result.long_length:.3f}",
        f"{result.mean_age:.2f}",
        f"{result.oldest}",
        f"{row.bound}",
        f"{result.discarded:.1%}" if result.discarded else "0",
        f"{result.wasted:.1%}" if result.wasted else "0",
    ]


def schedules(workload: Workload, seeds: range) -> Table:
    """All of them on one workload."""
    results = {row.name: measured(row, workload, seeds) for row in compared(workload)}
    synchronous = results[SYNCHRONOUS]
    rows = [cells(row, results[row.name], synchronous) for row in compared(workload)]
    note = filled(
        NOTE, skipped=Result.SKIPPED, steps=workload.steps, groups=workload.groups
    )
    return Table("Schedules", ["schedule", *COMPARED], rows, note)


def settings_table(workload: Workload, seeds: range) -> Table:
    """Speed and ages over S and f."""
    synchronous = measured(compared(workload)[0], workload, seeds)
    lines = []
    for window in (0.01, 0.1, 0.3, 0.5, 1.0):
        line = [f"{window}"]
        for staleness in (1, 2, 3):
            row = windowed(workload, staleness, window)
            result = measured(row, workload, seeds)
            speed = result.tokens_per_second / synchronous.tokens_per_second
            line.append(
                f"{speed:.2f}x, {result.mean_age:.1f} / {result.oldest} / {row.bound}"
            )
        lines.append(line)
    note = "Tokens/s over the synchronous run, then mean age / oldest / bound."
    return Table("Staleness S and window f", ["f", "S = 1", "S = 2", "S = 3"], lines, note)


def tails_table(seeds: range) -> Table:
    """Speed over the spread of lengths and the speed of training."""
    lines = []
    for sigma in (0.5, 1.0, 1.5):
        line = [f"{sigma}"]
        for speed in (7_000.0, 14_000.0, 28_000.0):
            workload = Workload(sigma=sigma, train_tokens_per_second=speed)
            synchronous, ours = (
                measured(row, workload, seeds)
                for row in (compared(workload)[0], windowed(workload, 2, 0.3))
            )
            line.append(
                f"{ours.tokens_per_second / synchronous.tokens_per_second:.2f}x, {ours.trainer_busy:.0%}"
            )
        lines.append(line)
    note = "S = 2, f = 0.3: tokens/s over the synchronous run, and the trainer's busy share, by the trainer's tokens/s."
    return Table(
        "Other lengths, other trainers", ["sigma", "7,000", "14,000", "28,000"], lines, note
    )


def draw(workload: Workload, path: Path) -> None:
    """The synchronous run, the drained overlap, and ours with S = 1 and 2, one above the other."""
    synchronous, drained, *_ = compared(workload)
    rows = [synchronous, drained, windowed(workload, 1, 0.3), windowed(workload, 2, 0.3)]
    figure, panels = pyplot.subplots(
        len(rows), figsize=(9, 6), sharex=True, layout="constrained"
    )
    for row, panel in zip(rows, panels, strict=True):
        _draw_row(panel, row, row.run(workload, seed=0))
    panels[-1].set_xlabel("minutes")
    shown = [
        Patch(color=ENGINES, label="samples in the engines"),
        Patch(color=TRAINER, label="trainer busy"),
    ]
    figure.legend(handles=shown, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)


def _draw_row(axes: Axes, row: Row, record: Record) -> None:
    """Engines above, the trainer below, from the beginning of the steady part."""
    before, _, _ = parts(record)
    start, slots = before[-1].end, record.workload.engines * record.workload.slots
    times, decoding = zip(*record.decoding, strict=True)
    minutes = [(time - start) / 60 for time in times]
    axes.fill_between(
        minutes,
        [samples / slots for samples in decoding],
        step="post",
        color=ENGINES,
        linewidth=0,
    )
    spans = [
        ((step.start - start) / 60, (step.end - step.start) / 60) for step in record.steps
    ]
    axes.broken_barh(spans, (-0.45, 0.35), color=TRAINER, linewidth=0)
    axes.set(xlim=(0, MINUTES), ylim=(-0.5, 1.05), yticks=(0, 1), yticklabels=("0", "full"))
    axes.set_title(row.name.strip("*"), loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Simulate all and write the page."""
    arguments = read_options(__doc__, seeds=5, output=None, picture=None)
    workload, seeds = Workload(), range(arguments.seeds)
    if arguments.picture:
        draw(workload, arguments.picture)
    described = filled(
        DESCRIBED, **vars(workload), seeds=arguments.seeds, skipped=Result.SKIPPED
    )
    page = HEADER.format(described=described)
    page += "\n".join(
        table.markdown()
        for table in (
            schedules(workload, seeds),
            settings_table(workload, seeds[:3]),
            tails_table(seeds[:3]),
        )
    )
    write_page(arguments.output, page)
    print(page)


if __name__ == "__main__":
    main()
