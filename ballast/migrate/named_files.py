"""Find the configuration that a command names: `--config F`, `--config-path D --config-name N`, `@ F`."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from ballast.migrate.parents import BASES
from workers.errors import ConfigError

FLAGS = re.compile(r"--(config|config[-_]path|config[-_]name)(?:=(.*))?", re.DOTALL)
SUFFIXES = (".yaml", ".yml", ".json", ".toml")


def find_named_file(words: Sequence[str], folder: Path, notes: list[str]) -> Path | None:
    """Return the file below `folder`, one of its parents, or the program's package.

    None: the command names none, or one of verl's own, whose defaults the table holds. Raises ConfigError if
    there is no such file.
    """
    values = _values_of_flags(words)
    name = values.get("name") or values.get("config", "")
    if not name:
        return None
    if not name.endswith(SUFFIXES):
        name = f"{name}.yaml"
    location = Path(values.get("path", "")) / name
    if location.stem in BASES:
        return None
    beside = folder / name
    if "$" in str(location) and "$" not in name and beside.is_file():
        notes.append(
            f"--config: only a shell knows the folder {location.parent}. {name} beside it was read."
        )
        return beside
    if "$" in str(location):
        notes.append(
            f"--config: only a shell knows {location}. Its keys are not read, migrate it too."
        )
        return None
    bases = (folder, *folder.resolve().parents, Path.cwd())
    programs = _folders_of_program(words)
    # Hydra's usual name.
    inner_folders = (Path(), *programs, *(program / "config" for program in programs))
    paths = [base / inner / location for base in bases for inner in inner_folders]
    file = next((path for path in paths if path.is_file()), None)
    if file is None:
        raise ConfigError(
            f"--config={location}: no such file from {folder} or a folder above it. Its keys would be "
            "missing. Put it there, or take the flag off to translate the other words alone."
        )
    return file


def _values_of_flags(words: Sequence[str]) -> dict[str, str]:
    """Return `config`, `path` and `name`."""
    values: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag = FLAGS.fullmatch(word)
        if flag:
            values[re.sub(r"config[-_]", "", flag[1])] = flag[2] or following
        elif word == "@" and following.endswith(SUFFIXES):  # prime-rl's
            values["config"] = following
    return values


def _folders_of_program(words: Sequence[str]) -> list[Path]:
    """Return the folders of `-m package.module` and `package/program.py`. Hydra's paths begin there."""
    programs = [word for word in words if word.endswith(".py")]
    modules = [following for word, following in pairwise(words) if word == "-m"]
    paths = [*map(Path, programs), *(Path(module.replace(".", "/")) for module in modules)]
    return [path.parent for path in paths]
