"""Commands that moved to ballast answer under their earlier names, and say the new one."""

import importlib
import runpy
import sys
from pathlib import Path

import pytest

import controller
from ballast.commands import COMMANDS

REMOVED = {"whatif"}
EARLIER = sorted(
    {path.stem for path in (Path(controller.__file__).parent / "moved").glob("[a-z]*.py")}
    - REMOVED
)


@pytest.mark.parametrize("name", EARLIER)
def test_a_moved_command_answers_under_its_earlier_name(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"controller.{name}", run_name="__main__", alter_sys=False)
    out, err = capsys.readouterr()
    assert end.value.code == 0
    assert "usage" in out
    (line,) = err.splitlines()
    new = line.partition("`ballast ")[2].partition("`")[0]
    assert line.startswith(f"python -m controller.{name} is now ") and new in COMMANDS


@pytest.mark.parametrize(
    "entry_point",
    ["workers.torchvision_operators:install", "workers.rollout.weight_transfer:register"],
)
def test_what_an_earlier_installation_loads_is_still_there(entry_point: str) -> None:
    """A pull without a new installation leaves its entry points: torch ends every process if one is missing."""
    module, _, name = entry_point.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
