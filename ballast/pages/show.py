"""`ballast show runs/NAME [--step N] [--session K] [--validation] [--atif FOLDER]`: what samples said.

without --session   a table of the step's recorded samples
with it             one of them as a tree, see `controller.observability.session_tree`
with --atif         every sample of the step as a file for Harbor's tools, see `ballast.pages.atif`
"""

import argparse
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.table import Table

from ballast.pages.atif import write_trajectories
from controller.lifecycle.session import exit_code
from controller.observability.console import plain_console
from controller.observability.run_folder import Row, RunFolder
from controller.observability.session_tree import SHOWN, clean, draw_tree, is_whole, summary
from controller.preflight.arguments import OneLineParser
from workers.errors import ConfigError, DataError

COLUMNS = ("turns", "branches", "tokens", "reward", "advantage")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(partial(_show, arguments))


def _show(arguments: Sequence[str] | None) -> None:
    parser = OneLineParser(
        prog="python -m ballast show", description="What the samples of a run said."
    )
    parser.add_argument("folder", type=Path, metavar="runs/NAME", help="folder of the run")
    parser.add_argument("--step", type=int, metavar="N", help="step to show (the last)")
    parser.add_argument(
        "--session",
        type=int,
        metavar="K",
        help="sample to draw, by its number in the step's table",
    )
    parser.add_argument(
        "--validation",
        action="store_true",
        help="held-out responses instead of training samples",
    )
    parser.add_argument(
        "--atif",
        type=Path,
        metavar="FOLDER",
        help="write every sample of the step as an ATIF trajectory with token ids (run.record_samples)",
    )
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        raise ConfigError(
            f"{options.folder}: there is no such folder. Give a folder like runs/NAME."
        )
    if options.atif:
        _export(options)
        return
    run = RunFolder(options.folder)
    step = options.step
    number = options.session
    steps = (
        run.validated_steps
        if options.validation
        else sorted({row["step"] for row in run.samples})
    )
    step = max(steps, default=0) if step is None else step
    samples = (
        run.validation(step)
        if options.validation
        else (row for row in run.samples if row["step"] == step)
    )
    rows = list(filter(is_whole, samples))
    if not rows:
        hint = (
            f"Recorded are {steps[0]} to {steps[-1]}"
            if steps
            else "Name the folder of a run that has made steps"
        )
        raise DataError(f"--step={step}: {run.path} has no samples of it. {hint}.")
    title = f"{'validation at ' * options.validation}step {step}"
    if number is not None and not 0 < number <= len(rows):
        raise DataError(
            f"--session={number}: {title} has {len(rows)} recorded samples. Give 1 to {len(rows)}."
        )
    view = (
        _table(title, rows)
        if number is None
        else draw_tree(rows[number - 1], f"{title}, session {number}")
    )
    plain_console(sys.stdout).print(view, soft_wrap=False)


def _export(options: argparse.Namespace) -> None:
    if options.validation:
        raise ConfigError(
            "--validation: held-out responses have no token ids. Leave it out with --atif."
        )
    if options.session is not None:
        raise ConfigError(
            f"--session={options.session}: --atif writes every sample of a step. Leave it out."
        )
    paths = write_trajectories(options.folder, options.step, options.atif)
    print(f"{len(paths)} trajectories: {paths[0].parents[1]}")


def _table(title: str, rows: Sequence[Row]) -> Table:
    summaries = list(map(summary, rows))
    table = Table(
        "session", title=title, title_justify="left", box=None, expand=True, pad_edge=False
    )
    summary_names = {name for numbers in summaries for name in numbers}
    names = [name for name in COLUMNS if name in summary_names]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", ratio=1)
    for number, (row, numbers) in enumerate(zip(rows, summaries, strict=True), start=1):
        question = re.split(r"(?:^|\n\n)user: ", str(row.get("prompt", "")))[-1]
        line = " ".join(clean(question, SHOWN).split())
        table.add_row(str(number), *(numbers.get(name, "") for name in names), line)
    return table


if __name__ == "__main__":
    sys.exit(main())
