"""SwanLab and Trackio themselves, offline: each step, and a resumed run."""

import math
from pathlib import Path
from typing import Any

import pytest

from controller.config import load
from controller.observability.local_trackers import SwanLabTracker, TrackioTracker
from controller.preflight.tracker_checks import check_trackers
from tests.refusals import refused

SETTINGS = {"run.name": "first", "policy.optimizer.learning_rate": 1e-6}
ROWS = [
    {"prompt": "1+1=", "reward": 1.0},
    {"prompt": "<b>", "reward": math.nan, "record": "level: 1"},
]


@pytest.fixture
def trackio_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:

    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    return tmp_path


def trackio_metrics(run: str) -> list[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs("addition", run)


def test_trackio_gets_every_step_and_a_resumed_run_continues(
    trackio_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = TrackioTracker("addition", "first", SETTINGS)
    first.log(1, {"policy/loss": 0.5, "reward/mean": math.nan})
    first.table("samples", 1, ROWS)
    first.close(succeeded=False)
    second = TrackioTracker("addition", "first", SETTINGS, id=first.id)
    second.log(2, {"policy/loss": 0.25})
    second.close(succeeded=True)
    assert second.id == first.id
    rows = trackio_metrics(first.id)
    assert [row["policy/loss"] for row in rows if "policy/loss" in row] == [0.5, 0.25]
    assert [row["run/succeeded"] for row in rows if "run/succeeded" in row] == [0.0, 1.0]
    assert any("samples" in row for row in rows)
    assert capfd.readouterr().out == ""


def test_swanlab_records_offline_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:

    monkeypatch.setenv("SWANLAB_MODE", "offline")
    first = SwanLabTracker(tmp_path, "addition", "first", SETTINGS)
    first.log(1, {"policy/loss": 0.5})
    first.table("samples", 1, ROWS)
    first.close(succeeded=False)
    second = SwanLabTracker(tmp_path, "addition", "first", SETTINGS, id=first.id)
    second.log(2, {"policy/loss": 0.25})
    second.close(succeeded=True)
    assert second.id == first.id
    files = list((tmp_path / "swanlab").rglob("*.swanlab"))
    assert files
    assert b"policy/loss" in b"".join(file.read_bytes() for file in files)
    assert capfd.readouterr().out == ""


def test_swanlab_without_a_key_is_refused_and_offline_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("SWANLAB_MODE", "SWANLAB_API_KEY", "SWANLAB_SAVE_DIR", "SWANLAB_ROOT"):
        monkeypatch.delenv(variable, raising=False)
    config = load(
        None, ["model.path=model", "data.train=train.jsonl", "tracking.swanlab=true"]
    )
    with refused("tracking.swanlab"):
        check_trackers(config)
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    check_trackers(config)
