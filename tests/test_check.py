"""A change's tests are found, also where only an importer's importer has some."""

from pathlib import Path

import pytest

from tests.check import files_to_run


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("balancing/search/packing.py", "tests/balancing/search/test_packing.py"),
        ("ballast/migrate/rules.py", "tests/ballast/migrate/test_odd_values.py"),
        ("tests/test_check.py", "tests/test_check.py"),
    ],
)
def test_a_changed_file_has_its_tests(file: str, test: str) -> None:
    assert test in files_to_run([Path(file)])


def test_pages_have_none() -> None:
    assert files_to_run([Path("README.md")]) == []
