"""The command lines of `controller.evaluate` and `controller.generate`."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from controller.preflight.arguments import OneLineParser
from controller.sampling.jobs import Kind, Request

USAGE = (
    "python -m controller.{} [--config FILE] [--model PATH] [--trust-run] [--output FOLDER]{} [--dry-run] "
    "[key.sub=value ...]"
)


def parse_arguments(kind: Kind, arguments: Sequence[str] | None) -> tuple[Request, bool]:
    """(what is asked for, whether it is a dry run). Raises ConfigError; SystemExit(0) after --help."""
    parsed = _parser(kind).parse_intermixed_args(arguments)
    overrides = tuple(parsed.overrides)
    request = Request(parsed.config, parsed.model, parsed.output, overrides=overrides, prompts=parsed.prompts)
    return replace(request, trust_run=parsed.trust_run), parsed.dry_run


def _parser(kind: Kind) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=f"python -m controller.{kind.name}",
        usage=USAGE.format(kind.name, "" if kind.needs_reward else " [--prompts N]"),
        description=f"{kind.does} A configuration of a training is taken as it is: model, data, rollout and reward.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings (those of --model's run)")
    parser.add_argument(
        "--model", default="", metavar="PATH", help="a model, a run, or a checkpoint of a run (model.path)"
    )
    parser.add_argument(
        "--trust-run", action="store_true", help="run functions that the settings of --model's run name"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="where samples go; those that are there are not made again"
    )
    if not kind.needs_reward:
        parser.add_argument("--prompts", type=int, default=0, metavar="N", help="only so many prompts, the first (all)")
    else:
        parser.set_defaults(prompts=0)
    parser.add_argument("--dry-run", action="store_true", help="read all data, try the reward; start nothing")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    return parser
