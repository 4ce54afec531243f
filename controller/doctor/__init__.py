"""`python -m controller.doctor [--config FILE] [--model PATH] [key.sub=value ...]`: check a machine or a cluster.

    settings --> Ray --node_checks--> every node --cluster_checks--> what Ray offers, the run's place
                     --smoke_test--> all-reduce; one engine and one rank: update, new weights
                          a line each (`report`): ok, warn or FAIL, what was found, what to change

Checks the cluster in resources.ray_address or RAY_ADDRESS, else this machine. Exit code: 0, or 1 if a check failed.
Later checks run anyway. Everything started is stopped.
"""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import rich.console

from controller.config import Config, load
from controller.doctor.report import Report, fail, looking_at, ok
from controller.lifecycle.model_checks import check_models
from controller.lifecycle.session import exit_code, ray_session
from controller.preflight.arguments import OneLineParser
from controller.preflight.checks import check
from workers.errors import BallastError

ANYWHERE = ("model.path=tiny", "run.name=doctor")  # settings without a default, unused here


@dataclass(frozen=True)
class Options:
    """The command line."""

    config: Path | None
    model: str
    overrides: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    report = Report()
    return exit_code(lambda: examine(_options(arguments), report)) or report.exit_code


def examine(options: Options, report: Report) -> None:
    """Add every finding to the report."""
    config = configuration(options, report)
    with looking_at("loading torch, Ray and vLLM"):
        from controller.doctor.cluster_checks import Examination
        from controller.observability.console import Console

    with tempfile.TemporaryDirectory(prefix="ballast-doctor-") as folder:
        of_a_run = bool(config and options.config)
        examination = Examination(config or load(None, ANYWHERE), report, of_a_run, options.model, Path(folder))
        connected = False
        with report.guarding("Ray", "see docs/troubleshooting.md", told=False), ExitStack() as stack:
            with looking_at("Ray"):
                stack.enter_context(ray_session(examination.config, Console(rich.console.Console(quiet=True))))
            connected = True
            examination.of_cluster()
        if not connected:
            examination.of_this_machine()


def configuration(options: Options, report: Report) -> Config | None:
    """Read the run's settings, or only the overrides; None if unreadable. Refused settings count as a failure."""
    advice = "python -m controller.fit --config FILE --dry-run explains it"
    config = None
    try:
        given = options.overrides if options.config else (*ANYWHERE, *options.overrides)
        config = load(options.config, given)
        if options.config:
            check(config)
            with looking_at("the models"):
                check_models(config)
            report.add(ok("configuration", str(options.config)))
    except BallastError as error:
        report.add(fail("configuration", str(error).rstrip("."), advice))
    return config


def _options(arguments: Sequence[str] | None) -> Options:
    parser = OneLineParser(
        prog="python -m controller.doctor",
        usage="python -m controller.doctor [--config FILE] [--model PATH] [key.sub=value ...]",
        description="Check a machine or a cluster before the first run: a line for each finding, exit code 0 or 1.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the run's settings: its models, folder and place")
    parser.add_argument("--model", default="", metavar="PATH", help="for the engine and the rank (a tiny random one)")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    parsed = parser.parse_intermixed_args(arguments)
    return Options(parsed.config, parsed.model, tuple(parsed.overrides))
