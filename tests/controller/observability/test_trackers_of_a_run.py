"""All trackers of a run together, as it opens them, ends and goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
import wandb

from controller.checkpoints.progress import Progress
from controller.config import Config
from controller.observability.ray_metrics import RayMetrics
from controller.observability.run_folder import RunWriter
from controller.observability.trackers import GuardedTracker, open_trackers
from tests.json_lines import read_lines

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


def tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A configuration with every service, on this machine alone."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    config = Config()
    config.run.name, config.run.dir = "tracked", str(tmp_path)
    for name in SERVICES:
        setattr(config.tracking, name, True)
    return config


def test_a_resumed_run_goes_on_in_its_trackers_and_one_under_a_new_name_does_not(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tracked(tmp_path, monkeypatch)
    first = record(config, Progress(), 1)
    assert set(first) == set(SERVICES)
    config.run.resume = "auto"
    saved = json.loads(json.dumps(Progress(step=1, trackers=first).to_json()))
    assert record(config, Progress(**saved), 2) == first
    lines = read_lines(tmp_path / "tracked" / "metrics.jsonl")
    assert lines == [{"step": 1, "policy/loss": 1.0}, {"step": 2, "policy/loss": 2.0}]
    config.run.name, config.run.resume = "other", str(tmp_path / "tracked")
    assert not set(record(config, Progress(**saved), 2).values()) & set(first.values())


class Broken:
    """A library whose every call fails, with an error of no type of its own."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is broken")


LIBRARIES = {
    "Ray's metrics": "_metrics",
    "TensorBoard": "_writer",
    "W&B": "_run",
    "MLflow": "_client",
    "SwanLab": "_run",
    "Trackio": "_run",
}
"""Where each tracker holds its library."""


def test_a_tracker_that_fails_costs_a_line_and_not_the_run(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tracked(tmp_path, monkeypatch)
    lines: list[str] = []
    trackers, _ = open_trackers(config, {}, 0, lines.append, RayMetrics(config.run.name))
    guarded = [tracker for tracker in trackers if isinstance(tracker, GuardedTracker)]
    assert [tracker._service for tracker in guarded] == list(LIBRARIES)
    libraries = []
    for tracker in guarded:
        name = LIBRARIES[tracker._service]
        libraries.append(getattr(tracker._tracker, name))
        monkeypatch.setattr(tracker._tracker, name, Broken())
    with RunWriter(config.run_folder, "", trackers) as writer:
        for step in (1, 2):
            writer.step(step, {"policy/loss": float(step)})
            writer.samples(step, [{"prompt": "1+1="}])
    metrics = (config.run_folder / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 2
    for service in LIBRARIES:
        first, *others = [line for line in lines if line.startswith(f"{service}: ")]
        assert "is broken. It misses metrics of step 1" in first
        # Ray's metrics have neither tables nor an end.
        expected = 2 if service == "Ray's metrics" else 5
        assert others == [
            f"{service}: {expected} records failed. The run's folder has them"
        ]
    for library in libraries[1:]:
        for end in ("close", "finish"):
            if hasattr(library, end):
                getattr(library, end)()
    wandb.teardown()
