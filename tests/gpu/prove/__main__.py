"""`python -m tests.gpu.prove [--minutes 25] [--output docs/gpu-benchmark.md]`: see `tests.gpu.prove`."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from tests.gpu.prove.outcome import FAILED, Outcome, prove
from tests.gpu.prove.page import earlier_outcomes, save_json, section_of, write_section
from tests.gpu.prove.parts import parts_of
from tests.gpu.prove.versions import cards


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove this machine. Returns 1 if a part failed."""
    options = parse(arguments)
    gpus = 0 if options.device == "cpu" else len(cards())
    device = "cuda" if gpus else "cpu"
    parts = [
        part for part in parts_of(device) if not options.only or part.name in options.only
    ]
    options.folder.mkdir(parents=True, exist_ok=True)
    deadline = monotonic() + 60 * options.minutes
    outcomes: list[Outcome] = []
    print(
        f"{len(parts)} parts in at most {options.minutes:g} minutes on {device}; logs in {options.folder}",
        flush=True,
    )
    for index, part in enumerate(parts):
        left = deadline - monotonic()
        outcome = prove(
            parts, index, seconds_left=left, device=device, gpus=gpus, folder=options.folder
        )
        outcomes.append(outcome)
        # Also if a later part ends this program.
        save_json(options.folder / "proof.json", outcomes)
        print(
            f"{outcome.verdict:12}{part.name:24}{outcome.seconds:6.0f} s  {outcome.reason}",
            flush=True,
        )
    if options.output:
        record = options.output.with_suffix(".json")
        earlier = (
            earlier_outcomes(record, [part.name for part in parts]) if options.only else []
        )
        save_json(record, [*earlier, *outcomes])
        write_section(options.output, section_of([*earlier, *outcomes]))
    else:
        print(f"\n{section_of(outcomes)}")
    return int(any(outcome.verdict == FAILED for outcome in outcomes))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [part.name for part in parts_of("cuda")]
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.prove", description="Prove a card."
    )
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="for all parts together (25)"
    )
    parser.add_argument(
        "--output", type=Path, help="page whose section is replaced, with a JSON beside it"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu"), default="auto", help="cpu: small parts"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=[],
        metavar="PART",
        help=f"earlier results of other parts stay: {', '.join(names)}",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/proof"), help="logs and facts of parts"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # Otherwise a part would outlive its program.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
