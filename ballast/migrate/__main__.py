"""`python -m ballast migrate FILE_OR_COMMAND [--output FILE]`: translate another configuration of RL
training.

Reads scripts, commands, Python, YAML and JSON of verl, TRL and others. See `ballast.migrate`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.errors import ConfigError, one_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the YAML, and its counts to stderr. Exit code: 0, or 2 with one line about the problem."""
    parser = argparse.ArgumentParser(
        prog="python -m ballast migrate",
        usage="python -m ballast migrate FILE_OR_COMMAND [--output FILE [--overwrite]]",
        description=(
            "Translate a configuration of verl, TRL or another system into settings of ours. Nothing is run."
        ),
    )
    parser.add_argument(
        "--output", type=Path, help="file to write instead of printing the YAML"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the file of --output if it exists"
    )
    options, source = parser.parse_known_args(
        None if arguments is None else list(arguments)
    )
    if not source:
        parser.error("name a file, or give a command in quotes")
    from ballast.migrate.reading import read_recipe
    from ballast.migrate.translation import migrate
    from controller.preflight.arguments import writing

    try:
        if options.output and options.output.exists():
            _check_output(options.output, source, overwrite=options.overwrite)
        migration = migrate(read_recipe(source))
        if options.output:
            with writing("--output", options.output):
                options.output.write_text(migration.yaml, encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    if options.output:
        for line in migration.computed:
            print(f"computed: {line}", file=sys.stderr)
    else:
        print(migration.yaml, end="")
    counts = (
        f"{len(migration.settings)} settings",
        f"{len(migration.computed)} computed",
        f"{len(migration.open)} to decide",
        f"{len(migration.defaults)} defaults that differ",
        f"{len(migration.without)} keys without a counterpart",
        f"{len(migration.unknown)} unknown",
    )
    print(
        f"{migration.system}: {', '.join(counts)}. The YAML's first comments list them",
        file=sys.stderr,
    )
    return 0


def _check_output(output: Path, source: Sequence[str], *, overwrite: bool) -> None:
    if any(Path(word).exists() and output.samefile(word) for word in source):
        raise ConfigError(
            f"--output={output}: it is the file to translate. Name another file."
        )
    if not overwrite:
        raise ConfigError(
            f"--output={output}: the file exists. Name another file, or add --overwrite."
        )


if __name__ == "__main__":
    sys.exit(main())
