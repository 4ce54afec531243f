"""One run that logs to every tracker, on this machine alone, with a real engine.

About a minute. Only here do the numbers of a whole run reach all trackers through its configuration.
"""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.controller.observability.test_trackers import client, history, wandb_history
from tests.end_to_end.faults import without_validation
from tests.end_to_end.test_whole_loop import run_loop
from tests.json_lines import read_lines

TRACKERS = ("wandb", "mlflow", "swanlab", "trackio")
NAMES = ("policy/grad_norm", "reward/mean", "rollout/response_tokens_mean")
Histories = dict[str, dict[int, float]]  # by metric and step


@pytest.mark.slow
def test_every_tracker_has_the_numbers_of_every_step(
    ray_session: None,
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    trackers = [f"tracking.{name}=true" for name in TRACKERS]
    project = "tracking.project=together"
    overrides = [*without_validation(settings), *trackers, project, "run.name=tracked"]
    folder = run_loop([*overrides, "run.steps=2"]).folder
    lines = read_lines(folder / "metrics.jsonl")
    expected = {
        name: {line["step"]: line[name] for line in lines if name in line} for name in NAMES
    }
    assert list(expected["reward/mean"]) == [1, 2]
    assert in_tensorboard(folder) == {
        name: pytest.approx(values) for name, values in expected.items()
    }
    assert in_wandb(folder) == expected
    assert in_mlflow("together") == expected
    assert in_trackio("together", "tracked") == expected
    offline = b"".join(path.read_bytes() for path in folder.rglob("*.swanlab"))
    assert all(name.encode() in offline for name in NAMES)


def in_tensorboard(folder: Path) -> Histories:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)} for name in NAMES
    }


def in_wandb(folder: Path) -> Histories:
    import wandb

    wandb.teardown()  # as at the end of a process: only then is everything on disk
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = wandb_history(file)
    return {
        name: {row["_step"]: row[name] for row in rows if name in row} for name in NAMES
    }


def in_mlflow(project: str) -> Histories:
    experiment = client().get_experiment_by_name(project)
    (run,) = client().search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    return {name: dict(history(run.info.run_id, name)) for name in NAMES}


def in_trackio(project: str, run: str) -> Histories:
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(project, run)
    return {name: {row["step"]: row[name] for row in rows if name in row} for name in NAMES}
