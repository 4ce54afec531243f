"""Shared by the tests of configurations: a folder with everything that a valid one names."""

from pathlib import Path

import pytest

from tests.controller.config_workspace import write_workspace


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with `config.yaml` and what it names."""
    monkeypatch.chdir(tmp_path)
    write_workspace(tmp_path)
    return tmp_path
