"""`python -m controller.report runs/NAME`: one page about a run, made by `controller.observability.report`."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from controller.observability.report import write_report
from workers.errors import BallastError


def main(arguments: Iterable[str] | None = None) -> int:
    """Exit code: 0, or 2 with one line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m controller.report", description="One page about a run.")
    parser.add_argument("folder", type=Path, metavar="runs/NAME", help="folder of the run")
    options = parser.parse_args(None if arguments is None else list(arguments))
    try:
        print(write_report(options.folder))
    except (BallastError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
