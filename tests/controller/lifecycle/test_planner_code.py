"""The planner's loops are compiled in a process of their own, beside the start of the roles."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from balancing import precompile
from balancing.basics.compiled import COMPILED
from controller.lifecycle import planner_code
from controller.lifecycle.planner_code import compiling_planner

STAND_IN = "from pathlib import Path\nPath({file!r}).write_text(' '.join(__import__('sys').argv[1:]))\n{then}"


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that stands in for the compilation, and writes its arguments."""
    (tmp_path / "balancing").mkdir()
    (tmp_path / "balancing" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(planner_code, "is_compiled", lambda: False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "balancing" / "precompile.py"


def test_a_run_waits_for_the_compilation_of_its_plans(
    compiler: Path, tmp_path: Path
) -> None:
    file = tmp_path / "arguments"
    compiler.write_text(STAND_IN.format(file=str(file), then=""))
    with compiling_planner() as wait:
        wait()
        assert file.read_text() == "plans"


def test_a_start_that_fails_ends_the_compilation(compiler: Path, tmp_path: Path) -> None:
    compiler.write_text(
        STAND_IN.format(file=str(tmp_path / "x"), then="import time; time.sleep(600)")
    )
    before = children()
    with pytest.raises(KeyError), compiling_planner():
        assert len(children() - before) == 1
        raise KeyError
    assert children() == before


def test_compiled_plans_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_code, "is_compiled", lambda: True)
    before = children()
    with compiling_planner() as wait:
        assert children() == before
        wait()


@pytest.mark.skipif(not COMPILED, reason="needs Numba")
def test_code_on_disk_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = SimpleNamespace(cache_path=str(tmp_path))
    monkeypatch.setattr(
        precompile, "exchange_until_even", SimpleNamespace(stats=stats, __name__="loop")
    )
    assert not precompile.is_compiled()
    (tmp_path / "exchange.loop-197.py311.nbi").touch()
    assert precompile.is_compiled()
    stats.cache_path = None  # no folder is writable, so a process could leave nothing
    assert precompile.is_compiled()


def test_a_run_without_compilation_waits_for_no_code() -> None:
    """A variable of Numba's leaves functions as they are: nothing is compiled, so nothing is waited for."""
    script = "from balancing.precompile import is_compiled; print(is_compiled())"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "True\n", result.stderr
