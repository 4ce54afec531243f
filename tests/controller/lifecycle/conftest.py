"""A working directory with the files that stand-ins run on."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def stand_in_workspace(
    stand_in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A copy, which a test may change."""
    shutil.copytree(stand_in_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
