"""The harness of mutants changes code and nothing else."""

import gc
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import mutants_of
from tests.mutate import (
    QUICK,
    copy_tree,
    files_that_test,
    new_code,
    replace_code,
    statement_line,
    with_recorder,
)

SOURCE = '''"""Words: 1 < 2."""
from x import low_end
def clip(value: int, mask, clip_low, clip_high, *, size: int = 1) -> int:
    if value < clip_low and not mask.any():
        raise ValueError(f"{value} < {1 + 1}")
    return (value * mask) // max(size, 1) + clip_high
'''


def test_mutants_change_operators_bounds_masks_and_names(tmp_path: Path) -> None:
    file = tmp_path / "clip.py"
    file.write_text(SOURCE)
    changes = {(mutant.line, mutant.before, mutant.after) for mutant in mutants_of(file)}
    wanted = {
        (3, "1", "(2)"),
        (4, "value < clip_low", "(value <= clip_low)"),
        (4, "clip_low", "(clip_high)"),
        (4, "not mask.any()", "(mask.any())"),
        (4, "mask.any", "(mask.all)"),
        (6, "value * mask", "(value)"),
        (6, "max", "(min)"),
        (6, "clip_high", "(clip_low)"),
    }
    assert wanted <= changes
    assert not [line for line, _, _ in changes if line in (1, 2, 5)]
    for mutant in mutants_of(file):
        source = file.read_bytes()
        compile(
            source[: mutant.start] + mutant.after.encode() + source[mutant.end :],
            str(file),
            "exec",
        )


LOADED = """
LIMIT = 1
def outer(value, add=2):
    if value > LIMIT:
        return [(lambda x: x + add)(v) for v in (
            value,
            value * 2,
        )]
    return []
"""


def test_a_loaded_function_gets_the_code_of_its_mutant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "loaded_by_mutants.py"
    file.write_text(LOADED)
    monkeypatch.syspath_prepend(tmp_path)
    outer = importlib.import_module("loaded_by_mutants").outer
    gc.freeze()  # as after tests were collected
    source = file.read_bytes()
    replace_code(file, new_code(file, source, source.replace(b"x + add", b"x - add")) or {})
    assert outer(5) == [3, 8]
    for at_import in (b"LIMIT = 2", b"add=3"):
        changed = re.sub(at_import[:-1] + rb"\d", at_import, source)
        assert changed != source and new_code(file, source, changed) is None


def test_a_recorder_notes_the_statements_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recorded_by_mutants.py"
    file.write_text(LOADED)
    monkeypatch.syspath_prepend(tmp_path)
    outer = importlib.import_module("recorded_by_mutants").outer
    ran = set()
    monkeypatch.setattr(
        "builtins.__ran__", lambda name, line: ran.add((name, line)), raising=False
    )
    source = file.read_bytes()
    replace_code(file, new_code(file, source, with_recorder(source, "x.py")) or {})
    assert outer(5) == [7, 12] and ran == {("x.py", 4), ("x.py", 5)}
    assert [statement_line(source, line) for line in (4, 7, 9)] == [4, 5, 9]


def test_mirrored_tests_stand_where_the_file_stands() -> None:
    mirrored, others = files_that_test(Path("balancing/search/packing.py"), Path.cwd())
    assert "tests/balancing/search/test_packing.py" in mirrored
    assert not set(mirrored) & set(others)
    mirrored, _ = files_that_test(Path("workers/model/losses/value.py"), Path.cwd())
    # By the names that the package exports.
    assert "tests/workers/model/test_value_head.py" in mirrored


def test_quick_tests_are_those_without_a_marker_that_pytest_knows(
    pytestconfig: pytest.Config,
) -> None:
    """pytest ends with code 4 at an unknown one, before any test: `make check` ran nothing."""
    known = {
        line.partition(":")[0].partition("(")[0] for line in pytestconfig.getini("markers")
    }
    assert set(re.findall(r"\w+", QUICK)) - {"not", "and"} <= known


def test_a_copied_tree_keeps_the_times_by_which_numba_finds_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "tree"
    loop = source / "balancing" / "loop.py"
    code = loop.parent / "__pycache__" / "loop.nbi"
    code.parent.mkdir(parents=True)
    for number, file in enumerate((loop, code), start=1):
        file.write_text("LIMIT = 1")
        os.utime(file, (number * 1000, number * 1000))
    monkeypatch.chdir(source)
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "balancing/loop.py"], check=True)
    copy_tree(tmp_path / "copy")
    for file in (loop, code):
        copied = tmp_path / "copy" / file.relative_to(source)
        assert copied.stat().st_mtime == file.stat().st_mtime
        assert copied.read_text() == file.read_text()


SLOW_REPORTS = """
import time
def pytest_runtest_logreport(report):
    end_s = time.process_time() + 0.1
    while time.process_time() < end_s:
        pass
"""
TRIED = """
import sys
from pathlib import Path
from tests.mutants import mutants_of
from tests.mutate import try_mutants
sys.exit(try_mutants(mutants_of(Path("balancing/sum.py")), False, 0.05))
"""


def test_a_test_whose_time_ends_while_pytest_reports_is_left_out(tmp_path: Path) -> None:
    """An exception there ended the process of all tests, and with it the trial."""
    files = {
        "balancing/__init__.py": "",
        "balancing/sum.py": "def add(first, second):\n    return first + second\n",
        "tests/conftest.py": SLOW_REPORTS,
        "tests/balancing/test_sum.py": "from balancing.sum import add\n\ndef test_add(): assert add(1, 2) == 3\n",
        "pytest.ini": "[pytest]\nmarkers =\n    slow\n    gpu\n    soak\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    command = [sys.executable, "-P", "-c", TRIED]
    trial = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert trial.returncode == 0, trial.stdout + trial.stderr
    assert "slower than 0.05 s: tests/balancing/test_sum.py::test_add" in trial.stdout
    assert "died in mirrored tests: 0 of 1" in trial.stdout
