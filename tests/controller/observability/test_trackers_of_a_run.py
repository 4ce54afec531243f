"""All trackers of a run together, as it opens them, ends and goes on."""

import json
from pathlib import Path

import pytest
import wandb

from controller.checkpoints.progress import Progress
from controller.config import Config
from controller.observability.ray_metrics import RayMetrics
from controller.observability.run_folder import RunWriter
from controller.observability.trackers import open_trackers

SERVICES = ("wandb", "mlflow", "swanlab", "trackio")


def record(config: Config, progress: Progress, step: int) -> dict[str, str]:
    """A run of one step; returns its ids in the services."""
    trackers, ids = open_trackers(
        config, progress.trackers, progress.step, print, RayMetrics(config.run.name)
    )
    with RunWriter(config.run_folder, "", trackers, last_step=progress.step) as writer:
        writer.step(step, {"policy/loss": float(step)})
    wandb.teardown()
    return ids


def test_a_resumed_run_goes_on_in_its_trackers_and_one_under_a_new_name_does_not(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    config = Config()
    config.run.name, config.run.dir = "tracked", str(tmp_path)
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    for name in SERVICES:
        setattr(config.tracking, name, True)
    first = record(config, Progress(), 1)
    assert set(first) == set(SERVICES)
    config.run.resume = "auto"
    saved = json.loads(json.dumps(Progress(step=1, trackers=first).to_json()))
    assert record(config, Progress(**saved), 2) == first
    lines = [json.loads(line) for line in (tmp_path / "tracked" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "policy/loss": 1.0}, {"step": 2, "policy/loss": 2.0}]
    config.run.name, config.run.resume = "other", str(tmp_path / "tracked")
    assert not set(record(config, Progress(**saved), 2).values()) & set(first.values())
