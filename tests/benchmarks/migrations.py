"""Count how many of a system's stock recipes migrate, and how completely.

folder --recipe files--> migrate --> counts: migrated, refused, crashed, without an unknown key
folder --recipe files--> source_batches --> batches equal to the migrated ones, or not

Usage: python -m tests.benchmarks.migrations FOLDER [FOLDER ...] [--system NAME] [--show]
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ballast.migrate.reading import read_recipe
from ballast.migrate.translation import Migration, migrate
from tests.benchmarks.source_batches import (
    SOURCES,
    UnknownSizeError,
    of_offline,
    of_settings,
)
from workers.errors import ConfigError

SUFFIXES = (".sh", ".yaml", ".yml", ".toml")
PYTHON = (".py",)
EQUAL = "equal"
DIFFERENT = "different"
TO_DECIDE = "to decide"
NOT_COMPARED = "not compared"
SIZES_HERE = ("rollout.samples_per_prompt", "batch.")


@dataclass(frozen=True)
class Attempt:
    """refusal: the error's one line. crash: the type and text of any other exception. batch: see
    `compare_batch`.
    """

    path: Path
    migration: Migration | None = None
    refusal: str = ""
    crash: str = ""
    batch: str = ""

    @property
    def outcome(self) -> str:
        if self.crash:
            return "crashed"
        if self.migration is None:
            return "refused"
        return "unknown keys" if self.migration.unknown else "all keys read or named"


def recipe_files(
    folders: Sequence[Path], suffixes: Sequence[str] = SUFFIXES
) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(
            path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file()
        )


def compare_batch(recipe: Mapping[str, Any], migration: Migration) -> str:
    """Say whether the batch is the source's: equal, different, to decide, or not compared, with both or why."""
    try:
        if migration.command.module == "controller.fit":
            theirs: Any = SOURCES[migration.system](recipe)
            ours: Any = of_settings(migration.settings)
        else:
            theirs = of_offline(migration.system, recipe)
            size = migration.command.size
            ours = migration.settings.get(size, migration.command.known[size].default)
    except UnknownSizeError as reason:
        return f"{NOT_COMPARED}: {reason}"
    if theirs == ours:
        return EQUAL
    is_asked = any(line.startswith(SIZES_HERE) for line in migration.open)
    return f"{TO_DECIDE if is_asked else DIFFERENT}: {theirs} there, {ours} here"


def attempt(path: Path) -> Attempt:
    try:
        recipe = read_recipe([str(path)])
        migration = migrate(recipe)
        return Attempt(path, migration, batch=compare_batch(recipe, migration))
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
        "--system",
        default="",
        help="whose files they are; others are counted as taken for it",
    )
    parser.add_argument(
        "--python", action="store_true", help="read Python files too, as TRL's examples are"
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="print refusals, crashes, unknown keys and batches",
    )
    options = parser.parse_args(arguments)
    suffixes = (*SUFFIXES, *PYTHON) if options.python else SUFFIXES
    attempts = [attempt(path) for path in recipe_files(options.folders, suffixes)]
    if options.show:
        for result in attempts:
            unknown = result.migration.unknown if result.migration else []
            details = result.crash or result.refusal or f"{unknown} batch {result.batch}"
            print(f"{result.path}: {result.outcome} {details}")
    migrations = [result.migration for result in attempts if result.migration]
    systems = Counter(migration.system for migration in migrations)
    outcomes = Counter(result.outcome for result in attempts)
    batches = Counter(
        result.batch.partition(":")[0] for result in attempts if result.migration
    )
    print(
        f"{len(attempts)} files: {dict(outcomes)}, {dict(systems)}, batches {dict(batches)}"
    )
    are_others = options.system and set(systems) - {options.system}
    crashed = any(result.crash for result in attempts)
    return 1 if crashed or are_others or batches[DIFFERENT] else 0


if __name__ == "__main__":
    sys.exit(main())
