"""A checkpoint that fails costs no step, and the ones before it stay."""

from pathlib import Path
from typing import Any

from controller.checkpoints.checkpoint_writer import CheckpointWriter
from controller.checkpoints.progress import Progress, checkpoint_path, checkpoints_at, remove_old_samples, samples_path
from tests.controller.stand_ins.roles import Saves
from workers.errors import LostError, OutputError


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints_at(folder)]


def test_a_full_disk_is_said_and_counted_and_the_last_good_one_stays(tmp_path: Path) -> None:
    said: list[str] = []
    writer = CheckpointWriter(Saves(2), tmp_path, keep=2, log=said.append)
    for step in (1, 2, 3):
        writer.begin(Progress(step=step))
    writer.finish()
    assert names(tmp_path) == ["step-3", "step-1"]
    assert writer.failures == 1
    (line,) = said
    assert line.startswith(str(checkpoint_path(tmp_path.resolve(), 2)))
    assert line.endswith(f"{checkpoint_path(tmp_path.resolve(), 1)}.")


def test_a_stopped_run_saves_its_last_complete_step_once(tmp_path: Path) -> None:
    said: list[str] = []
    writer = CheckpointWriter(Saves(), tmp_path, keep=2, log=said.append)
    writer.at_stop(Progress(step=0))
    assert names(tmp_path) == []
    writer.begin(Progress(step=3))
    writer.at_stop(Progress(step=3))
    writer.at_stop(Progress(step=4))
    assert names(tmp_path) == ["step-4", "step-3"]
    assert said == ["saving a checkpoint of step 4"]


def test_a_stopped_run_that_cannot_save_ends_all_the_same(tmp_path: Path) -> None:
    class Lost(Saves):
        def save(self, path: str, step: int, extra: dict[str, Any]) -> None:
            raise LostError("policy dp=0 was lost")

    said: list[str] = []
    CheckpointWriter(Lost(), tmp_path, keep=2, log=said.append).at_stop(Progress(step=4))
    assert said[-1] == "no checkpoint of step 4: policy dp=0 was lost"


def test_a_checkpoint_is_saved_though_what_is_beside_it_is_not(tmp_path: Path) -> None:
    said: list[str] = []
    writer = CheckpointWriter(Saves(), tmp_path, keep=2, log=said.append)

    def full(path: Path, progress: Progress) -> None:
        raise OutputError(f"{path.name} of step {progress.step} has no room.")

    writer.begin(Progress(step=1), full)
    assert (names(tmp_path), writer.failures) == (["step-1"], 1)
    assert said == ["step-1 of step 1 has no room. The run goes on."]


def test_samples_stay_with_the_checkpoints_that_they_belong_to(tmp_path: Path) -> None:
    files = [samples_path(checkpoint_path(tmp_path, step)) for step in (1, 2, 3)]
    files[0].parent.mkdir(parents=True)
    for file in files:
        file.touch()
    CheckpointWriter(Saves(), tmp_path, keep=2, log=print).begin(Progress(step=2))
    remove_old_samples(tmp_path, 3)
    assert [file.exists() for file in files] == [False, True, True]
