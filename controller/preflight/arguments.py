"""Parse the command line of a training command: file, overrides, dry run."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from controller.config import Config, TrainingConfig
from controller.preflight.cluster import FORM, Cluster, parse_cluster
from controller.preflight.describe import section_names, settings_page
from controller.preflight.describe_time import TimeOptions
from controller.preflight.page import OPTION
from controller.preflight.time_inputs import DRAWS
from workers.errors import ConfigError

LARGEST_PRICE = 10**6


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Name the option if its file cannot be written. A full disk's error names no file."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{option}={path}: cannot be written: {reason}. Name another file."
        ) from None


@dataclass(frozen=True)
class Command:
    """A module that runs settings of `schema`.

    describes_clusters: whether it accepts --cluster. tries: what its dry run tries.
    """

    module: str
    description: str
    schema: type[TrainingConfig]
    describes_clusters: bool = False
    tries: str = "read all data"

    @property
    def usage(self) -> str:
        dry_run = (
            "--dry-run [--all] [--json] [--cluster NODES [--no-measure]]"
            if self.describes_clusters
            else "--dry-run [--all] [--json]"
        )
        return f"python -m {self.module} --config FILE [{dry_run}] [-v] [key.sub=value ...]"


FIT = Command(
    "controller.fit",
    "Train a policy by reinforcement learning.",
    Config,
    describes_clusters=True,
    tries="read all data, try the reward",
)


@dataclass(frozen=True)
class Arguments:
    """A parsed command line with unread overrides.

    cluster: value of --cluster. measure: whether to measure GPU memory. everything: whether a dry run prints
    all settings. time: how time is predicted.
    """

    config: tuple[Path, ...]
    overrides: tuple[str, ...]
    dry_run: bool
    cluster: Cluster | None = None
    measure: bool = True
    everything: bool = False
    time: TimeOptions = field(default_factory=TimeOptions)


class OneLineParser(argparse.ArgumentParser):
    """Raises a one-line ConfigError instead of printing argparse's usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Handle wrong arguments, for argparse."""
        raise ConfigError(f"{message}; {' '.join(self.format_usage().split())}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse an empty word, for argparse: pathlib makes the working directory of it."""
        words = sys.argv[1:] if args is None else list(args)
        if "" in words:
            previous_word = (
                words[words.index("") - 1] if words.index("") else "the first argument"
            )
            self.error(
                f"an argument is empty, behind {previous_word}: is a variable of the shell not set?"
            )
        return super().parse_known_args(words, namespace)


class _PrintSettings(argparse.Action):
    """`const`: the schema."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> NoReturn:
        print(settings_page(self.const))
        parser.exit(0)


def parse_arguments(argv: Sequence[str] | None = None, command: Command = FIT) -> Arguments:
    """Parse a command line, by default the process's.

    Raises ConfigError for an unknown option, without --config, for --cluster or --all without --dry-run, and
    for --no-measure without --cluster. SystemExit(0) after --help and --settings.
    """
    # Intermixed, so that overrides may come before, between and after options.
    parsed = _parser(command).parse_intermixed_args(argv)
    overrides = (*parsed.verbose, *parsed.overrides)
    if parsed.all and not parsed.dry_run:
        raise ConfigError(
            "--all works only with --dry-run. Add --dry-run (--settings explains every key)."
        )
    if parsed.json and not parsed.dry_run:
        raise ConfigError("--json works only with --dry-run. Add --dry-run.")
    if not command.describes_clusters:
        return Arguments(
            tuple(parsed.config), overrides, parsed.dry_run, everything=parsed.all
        )
    if parsed.cluster and not parsed.dry_run:
        raise ConfigError("--cluster works only with --dry-run. Add --dry-run.")
    time = TimeOptions(
        parsed.price, parsed.lengths, parsed.response_tokens, parsed.measured
    )
    if not parsed.cluster and (not parsed.measure or time != TimeOptions()):
        raise ConfigError(
            "--no-measure, --price, --lengths, --response-tokens and --measured work only with --cluster. "
            "Add --dry-run --cluster."
        )
    cluster = parse_cluster(parsed.cluster) if parsed.cluster else None
    return Arguments(
        tuple(parsed.config),
        overrides,
        parsed.dry_run,
        cluster,
        parsed.measure,
        parsed.all,
        time,
    )


def _parser(command: Command) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=f"python -m {command.module}",
        usage=command.usage,
        description=f"{command.description} Relative paths start at the working directory.",
        epilog=(
            f"Sections of settings: {', '.join(section_names(command.schema))}. --settings explains every "
            "key."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        action="append",
        metavar="FILE",
        help="YAML file of settings. Repeat --config for several files, of which the last wins",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help=f"{command.tries}, print what would run and where, and start nothing",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="with --dry-run: print every setting, not only changed ones",
    )
    parser.add_argument(
        OPTION,
        action="store_true",
        help="with --dry-run: print one JSON object, and notes on stderr",
    )
    if command.describes_clusters:
        parser.add_argument(
            "--cluster",
            default="",
            metavar="NODES",
            help=f"with --dry-run: placement, memory and time on {FORM}",
        )
        parser.add_argument(
            "--no-measure",
            action="store_false",
            dest="measure",
            help="with --cluster: do not measure memory, which takes seconds, once for each layout",
        )
        _add_time_options(parser)
    parser.add_argument(
        "--settings",
        action=_PrintSettings,
        nargs=0,
        const=command.schema,
        help="print every setting and exit",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="append_const",
        const="tracking.verbose=true",
        default=[],
        help="show imbalances and mismatch of every step",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.sub=value",
        help="settings that replace the file's",
    )
    return parser


def _price(text: str) -> float:
    price = float(text)
    if not 0 < price <= LARGEST_PRICE:
        raise argparse.ArgumentTypeError(
            f"{text} must be above 0 and at most {LARGEST_PRICE:,}"
        )
    return price


def _add_time_options(parser: argparse.ArgumentParser) -> None:
    """Add what --cluster predicts time with."""
    options: dict[str, tuple[Callable[[str], Any], Any, str]] = {
        "--price": (_price, 0.0, "price of a GPU for an hour"),
        "--lengths": (Path, None, "folder of a run whose lengths count"),
        "--response-tokens": (str, "", f"length of responses: {DRAWS}"),
        "--measured": (
            Path,
            None,
            "folder of a run on the same machine, to fit the prediction to",
        ),
    }
    for name, (kind, default, words) in options.items():
        parser.add_argument(
            name, type=kind, default=default, help=f"with --cluster: {words}"
        )
