"""`python -m controller.migrate FILE_OR_COMMAND [--output FILE]`: translate another system's configuration.

Reads scripts, commands and YAML of verl, and Python, YAML, JSON and commands of TRL. See `controller.migration`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the YAML, and its counts to stderr. Exit code: 0, or 2 with one line about the problem."""
    parser = argparse.ArgumentParser(
        prog="python -m controller.migrate",
        usage="python -m controller.migrate FILE_OR_COMMAND [--output FILE]",
        description="Translate a configuration of verl or TRL into settings of controller.fit. Nothing is run.",
    )
    parser.add_argument("--output", type=Path, help="file to write instead of printing the YAML")
    options, source = parser.parse_known_args(None if arguments is None else list(arguments))
    if not source:
        parser.error("name a file, or give a command in quotes")
    from controller.migration.reading import given
    from controller.migration.translation import migrate

    try:
        found = migrate(given(source))
        if options.output:
            options.output.write_text(found.yaml, encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not options.output:
        print(found.yaml, end="")
    print(
        f"{found.system}: {len(found.settings)} settings, {len(found.open)} to decide, {len(found.defaults)} defaults "
        f"that differ, {len(found.without)} keys without a counterpart, {len(found.unknown)} unknown. The YAML's first "
        "comments list them",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
