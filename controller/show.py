"""`python -m controller.show runs/NAME [--step N] [--session K] [--validation]`: what the samples of a run said.

without --session   a table of the step's recorded samples
with it             one of them as a tree, see `controller.observability.session_tree`
"""

import io
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.table import Table

from controller.lifecycle.session import exit_code
from controller.observability.console import plain_console
from controller.observability.run_folder import Row, RunFolder
from controller.observability.session_tree import SHOWN, clean, drawn, is_whole, summary
from controller.preflight.arguments import OneLineParser
from workers.errors import DataError


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(partial(_show, arguments))


def _show(arguments: Sequence[str] | None) -> None:
    parser = OneLineParser(prog="python -m controller.show", description="What the samples of a run said.")
    parser.add_argument("folder", type=Path, metavar="runs/NAME", help="folder of the run")
    parser.add_argument("--step", type=int, metavar="N", help="step to show (the last)")
    parser.add_argument("--session", type=int, metavar="K", help="sample to draw, by its number in the step's table")
    parser.add_argument("--validation", action="store_true", help="held-out responses instead of training samples")
    parser.add_argument("--full", action="store_true", help="texts as long as they were recorded")
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model writes letters that not every terminal has
    step, rows = _recorded(RunFolder(options.folder), options.step, options.validation)
    console, title = plain_console(sys.stdout), f"{'validation at ' * options.validation}step {step}"
    if options.session is None:
        console.print(_table(title, rows), soft_wrap=False)
        return
    if not 0 < options.session <= len(rows):
        raise DataError(
            f"--session={options.session}: {title} has {len(rows)} recorded samples. Give 1 to {len(rows)}."
        )
    longest = sys.maxsize if options.full else SHOWN
    row = rows[options.session - 1]
    tree = drawn(row, f"{title}, session {options.session}, sample {summary(row)['sample']}", longest)
    console.print(tree, soft_wrap=False)


def _recorded(run: RunFolder, step: int | None, validation: bool) -> tuple[int, list[Row]]:
    """Return a step, by default the last, and its recorded rows. Raises DataError without any."""
    steps = run.validated_steps if validation else sorted({row["step"] for row in run.samples})
    if not steps:
        kind = "validation" if validation else "sample"
        raise DataError(f"{run.path} holds no recorded {kind}. Name the folder of a run that has made one.")
    step = steps[-1] if step is None else step
    if step not in steps:
        known = ", ".join(map(str, steps)) if len(steps) < 10 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
        raise DataError(f"--step={step}: not recorded. Recorded are {known}.")
    rows = run.validation(step) if validation else (row for row in run.samples if row["step"] == step)
    if not (found := list(filter(is_whole, rows))):
        raise DataError(f"--step={step}: its records are damaged. Name another step.")
    return step, found


def _table(title: str, rows: Sequence[Row]) -> Table:
    found = [{"session": str(number)} | summary(row) for number, row in enumerate(rows, start=1)]
    table = Table(title=title, title_justify="left", box=None, expand=True, collapse_padding=True, pad_edge=False)
    names = [name for name in found[0] if name != "dropped" and any(each[name] for each in found)]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", ratio=1)
    for row, numbers in zip(rows, found, strict=True):
        asked = re.split(r"(?:^|\n\n)user: ", str(row.get("prompt", "")))[-1]
        table.add_row(*(numbers[name] for name in names), " ".join(clean(asked, SHOWN).split()))
    return table


if __name__ == "__main__":
    sys.exit(main())
