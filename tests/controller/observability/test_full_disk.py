"""A disk that is full: the system says so of a file that it does not name; the run does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from controller import fit
from controller.algorithm.validation_metrics import ScoredResponse
from controller.checkpoints.progress import checkpoint_path
from controller.config import load
from controller.observability.console import Console
from controller.observability.run_folder import RunWriter
from controller.observability.trackers import TensorBoardTracker
from tests.controller.stand_ins.roles import write
from tests.refusals import refused
from workers.errors import OutputError

FULL = "/dev/full"  # opens, and takes nothing
RESPONSE = ScoredResponse("0", "x", {"reward": 1.0})


@contextmanager
def writer(folder: Path, full: str) -> Iterator[RunWriter]:
    """Of a run whose file `full` lies on a full disk."""
    (folder / full).parent.mkdir(parents=True, exist_ok=True)
    (folder / full).symlink_to(FULL)
    with RunWriter(folder, "run: {}\n", []) as opened:
        yield opened


WRITES: dict[str, Callable[[RunWriter], None]] = {
    "config.yaml": lambda writer: None,
    "metrics.jsonl": lambda writer: writer.step(1, {"policy/loss": 0.5}),
    "lengths.jsonl": lambda writer: writer.lengths(1, lengths=np.array([3, 4])),
    "samples.jsonl": lambda writer: writer.samples(1, [{"reward": 0.5}]),
    "timeline.jsonl": lambda writer: writer.timeline(1, {"phases": []}),
    "validation/step-1.jsonl": lambda writer: writer.validation(1, [RESPONSE]),
    "summary.json": lambda writer: writer.summary({"steps": 1}),
}


@pytest.mark.parametrize("file", WRITES)
def test_the_file_that_could_not_be_written_is_named(tmp_path: Path, file: str) -> None:
    with (
        pytest.raises(OutputError) as caught,
        writer(tmp_path / "run", file) as opened,
    ):
        WRITES[file](opened)
    assert str(caught.value) == (
        f"{tmp_path / 'run' / file} could not be written: No space left on device. Make room, or set "
        "run.dir to another disk."
    )


def test_tensorboards_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = TensorBoardTracker(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracker._writer, "add_scalar", full)
    with refused(f"{tmp_path} could not be written: No space left on device", OutputError):
        tracker.log(1, {"policy/loss": 0.5})
    tracker.close(succeeded=False)


@pytest.mark.parametrize(
    ("checkpoints", "models", "left"),
    [
        (
            [2, 4],
            ["model-best", "model-4"],
            "run.resume=auto resumes from {4}, and saved are model-4, model-best.",
        ),
        ([], [], "there is no checkpoint to resume from, and no model is saved."),
    ],
)
def test_a_run_that_a_full_disk_stops_says_what_it_leaves(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpoints: list[int],
    models: list[str],
    left: str,
) -> None:
    config = load("config.yaml")
    for step in checkpoints:
        write(checkpoint_path(config.run_folder, step), step)
    for name in models:
        (config.run_folder / name).mkdir(parents=True)
        (config.run_folder / name / "config.json").write_text("{}")

    @contextmanager
    def training(*_: Any) -> Iterator[Any]:
        with writer(config.run_folder, "metrics.jsonl") as opened:
            yield opened

    monkeypatch.setattr(
        "controller.lifecycle.session.ray_session", lambda *_: nullcontext()
    )
    monkeypatch.setattr(
        "controller.training_loop.train", lambda run, *_: run.step(1, {"policy/loss": 0.5})
    )
    monkeypatch.setattr(fit, "training", training)
    with pytest.raises(OutputError) as caught:
        fit.run(
            config,
            SimpleNamespace(
                sources=[], validation=None, answer_warnings=[], warnings=[], step=b""
            ),
            Console(),
        )
    expected = left.replace("{4}", str(checkpoint_path(config.run_folder, 4)))
    assert str(caught.value).endswith(f"set run.dir to another disk; {expected}")
