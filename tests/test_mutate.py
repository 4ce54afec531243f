"""The harness of mutants changes code and nothing else."""

import re
from pathlib import Path

import pytest

from tests.mutate import QUICK, files_that_test, mutants_of

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
        compile(source[: mutant.start] + mutant.after.encode() + source[mutant.end :], str(file), "exec")


def test_mirrored_tests_stand_where_the_file_stands() -> None:
    mirrored, others = files_that_test(Path("balancing/search/packing.py"), Path.cwd())
    assert "tests/balancing/search/test_packing.py" in mirrored
    assert not set(mirrored) & set(others)


def test_quick_tests_are_those_without_a_marker_that_pytest_knows(pytestconfig: pytest.Config) -> None:
    """pytest ends with code 4 at an unknown one, before any test: `make check` ran nothing."""
    known = {line.partition(":")[0].partition("(")[0] for line in pytestconfig.getini("markers")}
    assert set(re.findall(r"\w+", QUICK)) - {"not", "and"} <= known
