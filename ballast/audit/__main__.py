"""`python -m ballast audit PATH [PATH]`: is a recorded step right, and where do two runs part.

    one path     every check of every step
    two paths    the first step, stage, row and token at which they differ

Exit codes: 0 nothing is wrong, 1 something is (or the two part), 2 a path cannot be read.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ballast.audit.bundle import Bundle
from ballast.audit.checks import check_step
from ballast.audit.comparison import compare_runs
from ballast.audit.finding import has_failed
from ballast.audit.page import WIDTH, print_findings, print_parting, print_step
from ballast.audit.run_checks import check_run, summarise
from ballast.audit.sources import Source, steps_at
from controller.preflight.arguments import OneLineParser
from workers.errors import ConfigError, DataError, one_line


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = _parser().parse_args(arguments)
        steps = [_select(path, steps_at(path), options.step) for path in options.paths]
        if len(steps) > 2:
            raise ConfigError("give one path to check, or two to compare.")
        if len(steps) == 2 and options.model:
            raise ConfigError("--model: it checks one path. Leave it out to compare two.")
        if len(steps) == 2:
            return _compare(steps[0], steps[1], as_json=options.json)
        return _check(steps[0], options.model, as_json=options.json)
    except (ConfigError, DataError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 1


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m ballast audit",
        description="Check a recorded step of any trainer, or compare two runs. See docs/audit.md.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="a bundle, a folder of bundles, or runs/NAME",
    )
    parser.add_argument("--step", type=int, metavar="N", help="this step alone (all)")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="MODEL",
        help="compute log-probs again with this model; further ones are checkpoints of other steps",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _select(path: Path, steps: list[Source], number: int | None) -> list[Source]:
    if number is None:
        return steps
    chosen = [step for step in steps if step.number == number]
    if not chosen:
        numbers = ", ".join(str(step.number) for step in steps[:10])
        raise DataError(
            f"--step={number}: {path} has no such step. Recorded are {numbers}."
        )
    return chosen


def _check(steps: Sequence[Source], models: Sequence[str], *, as_json: bool) -> int:
    console = _console()
    records = []
    summaries = []
    is_wrong = False
    for step in steps:
        bundle = step.load()
        findings = check_step(bundle)
        if models:
            from transformers.utils import logging

            # torch and transformers.
            from ballast.audit.model_checks import (
                check_with_models,
            )

            logging.disable_progress_bar()
            findings += check_with_models(bundle, models)
        summaries.append(summarise(bundle))
        is_wrong |= has_failed(findings)
        if as_json:
            records.append(
                _record(step.label, bundle, [finding.record for finding in findings])
            )
        else:
            print_step(console, step.label, bundle, findings)
    of_run = check_run(summaries)
    is_wrong |= has_failed(of_run)
    if as_json:
        record = {
            "steps": records,
            "run": [finding.record for finding in of_run],
            "wrong": is_wrong,
        }
        print(json.dumps(record, indent=1, allow_nan=False))
    elif of_run:
        print_findings(console, f"all {len(steps)} steps", of_run)
    return int(is_wrong)


def _record(label: str, bundle: Bundle, findings: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "path": label,
        "step": bundle.facts.step,
        "rows": bundle.row_count,
        "tokens": bundle.token_count,
        "missing": bundle.missing,
        "unread_columns": bundle.unread_columns,
        "findings": findings,
    }


def _compare(first: Sequence[Source], second: Sequence[Source], *, as_json: bool) -> int:
    parting = compare_runs(_loaders(first), _loaders(second))
    if as_json:
        record = {
            "compared": list(parting.compared),
            "columns": list(parting.columns),
            "missing": list(parting.missing),
            "differences": [difference.record for difference in parting.differences],
        }
        print(json.dumps(record, indent=1, allow_nan=False))
    else:
        print_parting(_console(), parting)
    return int(bool(parting.differences))


def _loaders(steps: Sequence[Source]) -> dict[int, Source]:
    return {step.number: step for step in steps}


def _console() -> Console:
    width = None if sys.stdout.isatty() else WIDTH
    return Console(
        file=sys.stdout, highlight=False, markup=False, width=width, force_jupyter=False
    )


if __name__ == "__main__":
    sys.exit(main())
