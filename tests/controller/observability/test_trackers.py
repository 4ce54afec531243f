"""Weights & Biases and MLflow themselves, on this machine alone: offline, and a folder in place
of a server.

Their imports take over a CPU second, so the tests make them: every process collects this file, and one runs it.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from controller.observability.trackers import (
    MlflowTracker,
    TensorBoardTracker,
    WandbTracker,
)
from tests.refusals import refused

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from wandb.proto.wandb_internal_pb2 import Record

SETTINGS = {"run.name": "first", "policy.optimizer.learning_rate": 1e-6}


@pytest.fixture
def mlflow_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    return tmp_path / "mlruns"


def client() -> "MlflowClient":
    from mlflow.tracking import MlflowClient

    return MlflowClient()


def history(run: str, name: str) -> list[tuple[int, float]]:
    return [(entry.step, entry.value) for entry in client().get_metric_history(run, name)]


def test_mlflow_gets_every_metric_of_every_step_and_how_the_run_ended(
    mlflow_folder: Path,
) -> None:
    tracker = MlflowTracker("addition", "first", SETTINGS, print)
    tracker.log(1, {"policy/loss": 0.5, "validation/pass@8": 0.25})
    tracker.log(
        2, {"policy/loss": math.nan} | {f"reward/{i}": float(i) for i in range(1500)}
    )
    tracker.close(succeeded=True)
    run = client().get_run(tracker.id)
    assert run.info.status == "FINISHED"
    assert run.data.params["policy.optimizer.learning_rate"] == "1e-06"
    assert history(tracker.id, "validation/pass_at_8") == [(1, 0.25)]
    assert history(tracker.id, "policy/loss")[0] == (1, 0.5)
    assert math.isnan(history(tracker.id, "policy/loss")[1][1])
    assert run.data.metrics["reward/1499"] == 1499.0


ROWS = [
    {"prompt": "1+1=", "reward": 1.0, "turns": [{"policy": "2"}, {"environment": "sure?"}]},
    {"prompt": "<b>|2+2=\n", "reward": math.nan, "record": "level: 1"},
]


def test_mlflow_has_samples_as_a_table_of_each_step(mlflow_folder: Path) -> None:
    tracker = MlflowTracker("addition", "first", SETTINGS, print)
    tracker.table("samples", 7, ROWS)
    tracker.close(succeeded=True)
    (file,) = mlflow_folder.rglob("samples/step-7.json")
    assert json.loads(file.read_text()) == {
        "columns": ["prompt", "reward", "turns", "record"],
        "data": [
            ["1+1=", 1.0, '[{"policy": "2"}, {"environment": "sure?"}]', None],
            ["<b>|2+2=\n", None, None, "level: 1"],
        ],
    }


def test_tensorboard_has_them_as_text_whose_html_is_shown_and_not_read(
    tmp_path: Path,
) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.table("samples", 7, ROWS)
    tracker.close(succeeded=True)
    events = EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Tensors("samples/text_summary")
    head, _, first, second = event.tensor_proto.string_val[0].decode().splitlines()
    assert event.step == 7
    assert head == "| prompt | reward | turns | record |"
    assert first.startswith("| 1+1= | 1 | [{&quot;policy&quot;: &quot;2&quot;}")
    assert second == r"| &lt;b&gt;\|2+2=<br> | nan |  | level: 1 |"


def test_a_resumed_run_continues_in_mlflow_and_metrics_wait_for_the_server(
    mlflow_folder: Path,
) -> None:
    said: list[str] = []
    first = MlflowTracker("addition", "first", SETTINGS, said.append)
    first.close(succeeded=False)
    assert client().get_run(first.id).info.status == "FAILED"
    second = MlflowTracker("addition", "first", SETTINGS, said.append, id=first.id)
    assert client().get_run(first.id).info.status == "RUNNING"
    (run,) = mlflow_folder.glob(f"*/{second.id}")
    away = run.rename(mlflow_folder.with_name("away"))
    second.log(1, {"policy/loss": 0.5})
    assert "1 metrics wait" in said[0]
    away.rename(run)
    second.log(2, {"policy/loss": 0.25})
    assert history(first.id, "policy/loss") == [(1, 0.5), (2, 0.25)]
    assert len(said) == 1


def test_a_run_that_mlflow_does_not_know_is_refused(mlflow_folder: Path) -> None:
    with refused("tracking.mlflow"):
        MlflowTracker("addition", "first", SETTINGS, print, id="0123")


def wandb_records(path: Path) -> Iterator["Record"]:
    """Of a .wandb file: a 7-byte header, then LevelDB's log format (checksum, length, kind, data in 32 KiB
    blocks).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768  # too little of the block is left for a header
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def wandb_history(path: Path) -> list[dict[str, object]]:
    items = [
        record.history.item for record in wandb_records(path) if record.HasField("history")
    ]
    return [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in row}
        for row in items
    ]


def test_wandb_records_offline_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "5ec12e7" + "0" * 33)
    first = WandbTracker(tmp_path / "first", "addition", "first", SETTINGS)
    first.table("samples", 1, ROWS)
    first.log(1, {"policy/loss": 0.5})
    first.log(2, {"policy/loss": 0.25, "reward/mean": 1.0})
    first.close(succeeded=False)
    second = WandbTracker(tmp_path / "second", "addition", "first", SETTINGS, id=first.id)
    second.log(3, {"policy/loss": 0.125})
    second.close(succeeded=True)
    import wandb

    wandb.teardown()  # as at the end of a process: only then is everything on disk
    assert second.id == first.id
    (file,) = (tmp_path / "first").glob(f"wandb/offline-run-*-{first.id}/run-*.wandb")
    rows = wandb_history(file)
    assert [(row["_step"], row["policy/loss"], row.get("reward/mean")) for row in rows] == [
        (1, 0.5, None),
        (2, 0.25, 1),
    ]
    (table,) = (tmp_path / "first").rglob("media/table/samples_*.table.json")
    assert json.loads(table.read_text())["columns"] == [
        "prompt",
        "reward",
        "turns",
        "record",
    ]
    assert [
        record.exit.exit_code for record in wandb_records(file) if record.HasField("exit")
    ] == [1]
    (file,) = (tmp_path / "second").glob(f"wandb/offline-run-*-{first.id}/run-*.wandb")
    assert [row["_step"] for row in wandb_history(file)] == [3]
    written = [
        path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()
    ]
    assert not any(b"5ec12e7" in path.read_bytes() for path in written)
