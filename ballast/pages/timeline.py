"""`python -m ballast timeline runs/NAME [--steps 3-5] [--output trace.json]`: trace a run for Perfetto or
Chrome.
"""

import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from controller.lifecycle.session import exit_code
from controller.observability.timeline import read_timeline, trace_events, write_trace
from controller.preflight.arguments import OneLineParser, writing
from workers.errors import ConfigError


def parse_steps(text: str) -> range:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise ValueError(text)
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(partial(_trace, arguments))


def _trace(arguments: Sequence[str] | None) -> None:
    parser = OneLineParser(
        prog="python -m ballast timeline", description="A run as a Perfetto trace."
    )
    parser.add_argument("folder", type=Path, metavar="runs/NAME", help="folder of the run")
    parser.add_argument(
        "--steps",
        type=parse_steps,
        metavar="3-5",
        help="steps to show, both ends included (all)",
    )
    parser.add_argument("--output", type=Path, help="file to write (runs/NAME/trace.json)")
    options = parser.parse_args(arguments)
    if options.output and options.output.exists():
        raise ConfigError(
            f"--output={options.output}: the file exists. Name another file, or remove it."
        )
    output = options.output or options.folder / "trace.json"
    events = trace_events(read_timeline(options.folder, options.steps))
    with writing("--output", output):
        write_trace(output, events)
    print(
        f"{output}: {len(events):,} events. Open it in https://ui.perfetto.dev or chrome://tracing"
    )


if __name__ == "__main__":
    sys.exit(main())
