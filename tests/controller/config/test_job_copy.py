"""In the copy that a Ray job works in, relative paths are answered with what they are relative to."""

from pathlib import Path

import pytest

from controller.config import load
from controller.preflight.checks import check
from tests.controller.config_workspace import refusal, write_workspace

COPY = "This Ray job works in a copy of its --working-dir"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "working_dir_files" / "_ray_pkg_0123456789abcdef"
    folder.mkdir(parents=True)
    write_workspace(folder)
    monkeypatch.chdir(folder)
    return folder


def test_a_job_says_that_it_works_in_a_copy(copy: Path, tmp_path: Path) -> None:
    absolute = f"run.dir={tmp_path / 'runs'}"
    check(load("config.yaml", [absolute]))
    for missing in ("model.path=models/gone", "data.train=gone.jsonl"):
        assert f"{COPY}, without files that git ignores: give an absolute path" in refusal(
            absolute, missing
        )
    assert COPY not in refusal(absolute, "model.path=/models/gone")
    assert refusal().startswith("run.dir: runs/test is relative to a Ray job's copy")


def test_elsewhere_relative_paths_are_answered_as_ever(workspace: Path) -> None:
    assert COPY not in refusal("model.path=models/gone")
    check(load("config.yaml"))
