"""Count how many of a system's stock recipes migrate, and how completely.

folder --recipe files--> migrate --> counts: migrated, refused, crashed, without an unknown key

Usage: python -m tests.benchmarks.migrations FOLDER [FOLDER ...] [--show]
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ballast.migrate.reading import read_recipe
from ballast.migrate.translation import Migration, migrate
from workers.errors import ConfigError

SUFFIXES = (".sh", ".yaml", ".yml", ".toml")


@dataclass(frozen=True)
class Attempt:
    """refusal: the error's one line. crash: the type and text of any other exception."""

    path: Path
    migration: Migration | None = None
    refusal: str = ""
    crash: str = ""

    @property
    def outcome(self) -> str:
        if self.crash:
            return "crashed"
        if self.migration is None:
            return "refused"
        return "unknown keys" if self.migration.unknown else "all keys read or named"


def recipe_files(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(
            path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()
        )


def attempt(path: Path) -> Attempt:
    try:
        return Attempt(path, migrate(read_recipe([str(path)])))
    except ConfigError as error:
        return Attempt(path, refusal=str(error))
    except Exception as error:  # a crash is a result here, and the count goes on
        return Attempt(path, crash=f"{type(error).__name__}: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument(
        "--show", action="store_true", help="print refusals, crashes and unknown keys"
    )
    options = parser.parse_args(arguments)
    attempts = [attempt(path) for path in recipe_files(options.folders)]
    if options.show:
        for result in attempts:
            unknown = result.migration.unknown if result.migration else []
            print(
                f"{result.path}: {result.outcome} {result.crash or result.refusal or unknown}"
            )
    systems = Counter(result.migration.system for result in attempts if result.migration)
    print(
        f"{len(attempts)} files: {dict(Counter(result.outcome for result in attempts))}, {dict(systems)}"
    )
    return 1 if any(result.crash for result in attempts) else 0


if __name__ == "__main__":
    sys.exit(main())
