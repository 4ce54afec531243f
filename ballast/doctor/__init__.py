"""`python -m ballast doctor [--config FILE] [--model PATH] [key.sub=value ...]`: check a machine or a
cluster.

    settings --> Ray --node_checks--> every node --cluster_checks--> what Ray offers
                     --smoke_test--> all-reduce, then one engine and one rank: update, new weights
                          a line each (`report`): ok, warn or FAIL, what was found, what to change

Checks the cluster in resources.ray_address or RAY_ADDRESS, else this machine. A failed check does not stop
later ones. Exit code: 0, or 1 if a check failed. Everything started is stopped.
"""

import json
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import rich.console

from ballast.doctor.report import Report, fail, looking_at, ok
from controller.config import Config, load
from controller.config.conditions import leave_out_cpu_settings
from controller.lifecycle.model_checks import check_models
from controller.lifecycle.session import exit_code, ray_session
from controller.preflight.arguments import OneLineParser
from controller.preflight.checks import check
from workers.errors import BallastError

ANYWHERE = ("model.path=tiny", "run.name=doctor")  # settings without a default, unused here


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    report = Report()
    code = exit_code(lambda: examine(_options(arguments), report)) or report.exit_code
    if report.as_json:
        print(json.dumps(report.to_json() | {"exit_code": code}, indent=1))
    return code


def examine(options: Namespace, report: Report) -> None:
    report.as_json = options.json
    config = configuration(options, report)
    with looking_at("loading torch, Ray and vLLM"):
        from ballast.doctor.cluster_checks import check_cluster, check_this_machine
        from controller.observability.console import Console

    checked = config or load(None, ANYWHERE)
    connected = False
    with tempfile.TemporaryDirectory(prefix="ballast-doctor-") as folder:
        with (
            report.guarding("Ray", "see docs/troubleshooting.md", verbose=False),
            ExitStack() as stack,
        ):
            with looking_at("Ray"):
                stack.enter_context(
                    ray_session(checked, Console(rich.console.Console(quiet=True)))
                )
            connected = True
            of_a_run = bool(config and options.config)
            check_cluster(
                checked, report, Path(folder), of_a_run=of_a_run, model=options.model
            )
        if not connected:
            check_this_machine(checked, report)


def configuration(options: Namespace, report: Report) -> Config | None:
    """Read the run's settings, or only the overrides. Refused settings are a failure, and None if
    unreadable.
    """
    advice = "python -m controller.fit --config FILE --dry-run explains it"
    config = None
    try:
        overrides = options.overrides if options.config else (*ANYWHERE, *options.overrides)
        config = load(options.config, overrides)
        if options.config:
            leave_out_cpu_settings(config)
            check(config)
            with looking_at("the models"):
                check_models(config)
            report.add(ok("configuration", str(options.config)))
    except BallastError as error:
        report.add(fail("configuration", str(error).rstrip("."), advice))
    return config


def _options(arguments: Sequence[str] | None) -> Namespace:
    parser = OneLineParser(
        prog="python -m ballast doctor",
        usage="python -m ballast doctor [--config FILE] [--model PATH] [--json] [key.sub=value ...]",
        description=(
            "Check a machine or a cluster before the first run: a line for each finding, exit code 0 or 1."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the run's settings: its models and its folder",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="PATH",
        help="for the engine and the rank (a tiny random one)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, and lines on stderr"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.sub=value",
        help="settings that replace the file's",
    )
    return parser.parse_intermixed_args(arguments)
