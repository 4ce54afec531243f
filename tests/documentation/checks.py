"""What is checked of a command, by its first word: dry-run where it is ours, its options where it is
another's.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from balancing.__main__ import main as balance
from ballast.commands import COMMANDS
from ballast.commands import main as ballast
from ballast.sampling_commands import evaluate, generate
from controller import fit, preferences, reward_model, sft
from tests.documentation.blocks import ROOT

MAINS = {
    "controller.fit": fit.main,
    "controller.sft": sft.main,
    "controller.preferences": preferences.main,
    "controller.reward_model": reward_model.main,
    "ballast.sampling_commands.evaluate": evaluate.main,
    "ballast.sampling_commands.generate": generate.main,
}


def dry_run(main: Callable[[list[str]], int], arguments: list[str]) -> None:
    """A training command: everything up to the start, with absolute shared folders inside the workspace."""
    if {"--settings", "--help"} & set(arguments):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        return
    local = [re.sub("(^|=)/shared", r"\1shared", argument) for argument in arguments]
    added = [] if "--dry-run" in local else ["--dry-run"]
    # tests/examples/test_launch.py measures.
    added += ["--no-measure"] * ("--cluster" in local)
    assert main([*local, *added]) == 0


def module_is_there(module: str) -> None:
    assert importlib.util.find_spec(module) is not None, f"there is no module {module}"


def ray_understands(words: list[str]) -> None:
    """Ray's own command line takes these options; nothing is started."""
    from ray.scripts.scripts import cli

    command, rest = cli, words[1:]
    while hasattr(command, "commands"):
        name, *rest = rest
        assert name in command.commands, f"ray has no command {name}"
        command = command.commands[name]
    command.make_context(command.name, rest, resilient_parsing=False).close()


def pip_finds(words: list[str]) -> None:
    """Extras and requirement files that `pip install` names are those of this project."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for named in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
        assert set(named.split(",")) <= set(extras)


def make_has(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert [word for word in words[1:] if "=" not in word and word not in targets] == []


def run_python(words: list[str]) -> None:
    assert words[1] == "-m", f"{words}: only modules are started in the documentation"
    module, arguments = words[2], words[3:]
    if module == "ballast" and arguments[0] in COMMANDS:
        module, arguments = (
            COMMANDS[arguments[0]].module.removesuffix(".__main__"),
            arguments[1:],
        )
    if module == "ballast":
        assert ballast(arguments) == 0
    elif module in MAINS:
        dry_run(MAINS[module], arguments)
    elif module == "balancing":
        assert balance(arguments) in (None, 0)
    else:
        module_is_there(module)


def is_installed(words: list[str]) -> None:
    assert shutil.which(words[0], path=str(Path(sys.executable).parent)), (
        f"{words[0]} is not installed"
    )


def runs(words: list[str]) -> None:
    subprocess.run(words, check=True)


def sets_variables(words: list[str]) -> None:
    assert [word for word in words[1:] if not re.fullmatch(r"[A-Z_]+=\S+", word)] == []


def activates(words: list[str]) -> None:
    """The environment that `make setup` makes, which is the one that the tests run in."""
    assert words[1:] == [".venv/bin/activate"]
    assert (Path(sys.prefix) / "bin" / "activate").is_file()


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "python": run_python,
    ".venv/bin/python": run_python,
    "ray": ray_understands,
    "pip": pip_finds,
    "make": make_has,
    "cp": runs,
    "tensorboard": is_installed,
    "hf": is_installed,
    "export": sets_variables,
    "source": activates,
}
