"""`python -m ballast certify mine.yaml`: is this data set, reward or environment worth a GPU?

Exit codes: 0 nothing certain is wrong, 1 a defect is certain, 2 something cannot be read.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ballast.certify.behaviour_checks import check_behaviour
from ballast.certify.certificate import Certificate
from ballast.certify.data_checks import check_data
from ballast.certify.environment.all_checks import check_environments
from ballast.certify.page import page_lines
from ballast.certify.prompt_checks import check_prompts
from ballast.certify.reward_checks import check_reward
from ballast.certify.signal import check_signal
from ballast.certify.subject import Subject, make_config, read_subject
from ballast.certify.training import check_training
from controller.observability.certificates import FILE, certificate_file
from controller.preflight.arguments import OneLineParser, writing
from controller.preflight.page import prints_to_stderr
from workers.errors import BallastError, ConfigError, one_line

Check = Callable[[Subject, Certificate], None]

TIMES = {
    "quick": "about a minute",
    "default": "about ten minutes",
    "train": "about half an hour",
}
QUICK: dict[str, Check] = {
    "data": check_data,
    "prompts": check_prompts,
    "reward": check_reward,
    "behaviour": check_behaviour,
    "environment": check_environments,
}
"""Checks of all levels, in the order of the page. Each adds to the certificate what it saw."""
DEFAULT: dict[str, Check] = {"signal": check_signal}
TRAIN: dict[str, Check] = {"train": check_training}
"""Checks that the levels default and --train add."""


def main(arguments: Sequence[str] | None = None) -> int:
    request = _parser().parse_intermixed_args(arguments)
    try:
        return _certify(request)
    except (BallastError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2


def _certify(request: argparse.Namespace) -> int:
    files = [part for part in request.parts if "=" not in part]
    overrides = [part for part in request.parts if "=" in part]
    if len(files) > 1:
        raise ConfigError(f"{files[1]}: a second configuration. Name one.")
    if not (files or request.environment or request.reward):
        raise ConfigError(
            "certify: nothing to certify. Name a configuration, --environment or --reward."
        )
    path = Path(files[0]) if files else None
    config = make_config(path, request.environment, request.reward, request.data, overrides)
    level = "train" if request.train else "quick" if request.quick else "default"
    name = str(path or request.environment or request.reward)
    if not request.json:
        print(f"certify {name}: level {level}, {TIMES[level]}", flush=True)
    certificate = Certificate(name, level, list(config.data.weights))
    with prints_to_stderr():
        subject = read_subject(config, name, request.answer_key)
        subject = replace(subject, model=request.model, write=request.write)
        for check_name, check in checks_of(level).items():
            start = time.monotonic()
            check(subject, certificate)
            certificate.seconds[check_name] = time.monotonic() - start
    text = json.dumps(certificate.to_json(), indent=1)
    output = request.output or certificate_file(config.data.weights) or Path(FILE)
    with writing("--output", output):
        output.write_text(text + "\n")
    print(
        text
        if request.json
        else "\n".join([*page_lines(certificate), "", f"written: {output}"])
    )
    return 1 if certificate.is_certain else 0


def checks_of(level: str) -> dict[str, Check]:
    checks = dict(QUICK)
    if level != "quick":
        checks |= DEFAULT
    if level == "train":
        checks |= TRAIN
    return checks


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m ballast certify",
        usage="python -m ballast certify [mine.yaml] [--quick | --train] [options] [key.sub=value ...]",
        description="Try data, reward, tools and environment of a run before it gets a GPU.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="mine.yaml",
        help="the run's configuration, and settings",
    )
    levels = parser.add_mutually_exclusive_group()
    levels.add_argument("--quick", action="store_true", help="no model, a minute")
    levels.add_argument(
        "--train", action="store_true", help="also train a small policy, half an hour"
    )
    parser.add_argument(
        "--environment", default="", metavar="NAME", help="a class, or verifiers:NAME"
    )
    parser.add_argument(
        "--reward", default="", metavar="FILE.py:FUNCTION", help="a reward function"
    )
    parser.add_argument("--data", default="", metavar="FILE", help="its records")
    parser.add_argument(
        "--answer-key",
        default="",
        metavar="COLUMN",
        help="column with the records' answers",
    )
    parser.add_argument(
        "--model", default="", metavar="PATH", help="a small policy that samples"
    )
    parser.add_argument(
        "--write", action="store_true", help="write a difficulty column next to the data"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to write the certificate"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of the page"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
