"""`python -m ballast report runs/NAME`: write one page about a run, see `controller.observability.report`."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from controller.lifecycle.session import exit_code
from controller.observability.report import write_report
from controller.preflight.arguments import OneLineParser


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(partial(_report, arguments))


def _report(arguments: Sequence[str] | None) -> None:
    parser = OneLineParser(
        prog="python -m ballast report", description="One page about a run."
    )
    parser.add_argument("folder", type=Path, metavar="runs/NAME", help="folder of the run")
    print(write_report(parser.parse_args(arguments).folder))


if __name__ == "__main__":
    sys.exit(main())
