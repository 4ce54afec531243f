"""A tool of ballast/ is a folder that can be removed as a whole: the rest trains, imports and lists its commands."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.controller.config_workspace import write_workspace
from tests.plain_lines import PACKAGES

ROOT = Path(__file__).parents[2]
TOOLS = sorted(path.parent.name for path in (ROOT / "ballast").glob("*/__init__.py"))
STANDS_ON = {"loop": ["serve"]}
"""Tool: others that import it, and go with it."""
ASSETS = ("ballast.configs", "ballast.examples")

TRAIN_AND_IMPORT = f"""
import importlib, pkgutil, sys
# An editable installation would find a removed folder in the repository.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
import ballast, ballast.commands, controller.fit
assert controller.fit.main(["--config", "config.yaml", "--dry-run"]) == 0
for module in pkgutil.walk_packages(ballast.__path__, "ballast."):
    if not module.name.startswith({ASSETS}) and not module.name.endswith(".__main__"):
        importlib.import_module(module.name)
for command in ballast.commands.COMMANDS.values():
    importlib.import_module(command.module)
print("commands:", *ballast.commands.COMMANDS)
for name in sys.argv[1:]:
    ballast.commands.main([name])
"""


@pytest.mark.drawn(1)
@pytest.mark.parametrize("tool", TOOLS)
def test_the_rest_stands_without_a_tool(tool: str, tmp_path: Path) -> None:
    from ballast.commands import COMMANDS

    write_workspace(tmp_path)
    tree = tmp_path / "tree"
    for package in PACKAGES:
        # Compiled files come along, and `copy2` keeps the times by which Python takes them.
        shutil.copytree(
            ROOT / package, tree / package, ignore=shutil.ignore_patterns("examples")
        )
    removed = [tool, *STANDS_ON.get(tool, [])]
    for name in removed:
        shutil.rmtree(tree / "ballast" / name)
    modules = tuple(f"ballast.{name}" for name in removed)
    gone = [
        name for name, command in COMMANDS.items() if command.module.startswith(modules)
    ]
    process = subprocess.run(
        [sys.executable, "-c", TRAIN_AND_IMPORT, *gone],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tree)},
        text=True,
        capture_output=True,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1].split()[1:] == [
        name for name in COMMANDS if name not in gone
    ]
    refusals = [
        f"error: ballast {name}: {COMMANDS[name].module} is not installed." for name in gone
    ]
    assert process.stderr.splitlines()[-len(gone) :] == refusals
