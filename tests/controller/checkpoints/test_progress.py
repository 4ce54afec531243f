"""A run's checkpoints: found, resumed from, and saved; one that fails costs no step, and the ones before
stay.
"""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from controller.checkpoints.checkpoint_writer import CheckpointWriter, resume
from controller.checkpoints.progress import (
    Progress,
    check_same_data,
    checkpoint_path,
    checkpoints_at,
    remove_old_samples,
    replay_path,
    samples_path,
)
from controller.config import load
from controller.observability.run_folder import RunWriter
from tests.controller.stand_ins.roles import Saves, write
from tests.json_lines import read_lines
from tests.refusals import refused
from workers.errors import CheckpointError, LostError, OutputError
from workers.model.checkpoint.checkpoint_folder import (
    MANIFEST,
    read_manifest,
)


def test_the_checkpoints_of_a_run_are_found_newest_first(tmp_path: Path) -> None:
    paths = [write(checkpoint_path(tmp_path, step), step) for step in (9, 30, 10)]
    assert checkpoints_at(tmp_path) == [paths[1], paths[2], paths[0]]
    assert checkpoints_at(paths[0]) == [paths[0]]
    assert checkpoints_at(tmp_path / "nothing") == []


def test_a_torn_checkpoint_is_passed_over_and_refused_by_name(tmp_path: Path) -> None:
    good, torn = (write(checkpoint_path(tmp_path, step), step) for step in (1, 2))
    (torn / "shard").write_bytes(b"wei")
    assert checkpoints_at(tmp_path) == [good]
    with refused(f"{torn.name} is torn: shard has 3 bytes", CheckpointError):
        checkpoints_at(torn)


def test_a_run_that_goes_on_keeps_its_records_until_the_checkpoint(tmp_path: Path) -> None:
    with RunWriter(tmp_path, "", []) as writer:
        for step in range(5):
            writer.step(step, {"loss": float(step)})
            writer.lengths(step, lengths=np.array([step]))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # the crash
    with RunWriter(tmp_path, "", [], last_step=2) as writer:
        writer.step(3, {"loss": 30.0})
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in lines] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]
    assert len((tmp_path / "lengths.jsonl").read_text().splitlines()) == 3
    with RunWriter(tmp_path, "", []):  # a run that starts anew keeps nothing
        pass
    assert (tmp_path / "metrics.jsonl").read_text() == ""


RESUMED = ("model.path=model", "run.name=run", "run.resume=auto")


def roles_that_refuse(name: str) -> SimpleNamespace:
    """A policy that cannot load the checkpoint of this name."""

    def load_checkpoint(path: str) -> dict[str, Any]:
        if path.endswith(name):
            raise CheckpointError("a checksum differs")
        return read_manifest(Path(path)).extra

    policy = SimpleNamespace(load_checkpoint=load_checkpoint)
    return SimpleNamespace(trained={"policy": policy})


def test_an_older_checkpoint_is_not_taken_silently_with_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest one, which is of this run's data, has all its files and cannot be loaded."""
    older, newest = ({"settings": {"run.seed": seed}} for seed in (0, 1))
    for step, data in ((1, older), (2, newest)):
        write(checkpoint_path(tmp_path / "run", step), step, data=data)

    roles = roles_that_refuse("step-2")
    config = load(None, [*RESUMED, f"run.dir={tmp_path}"])
    check_same_data(config, newest)
    with refused("run.seed=1 was 0"):
        resume(config, roles, str, newest)
    assert len(checkpoints_at(tmp_path / "run")) == 2, (
        "it was refused, and a checkpoint removed"
    )
    config.run.on_data_change = "keep_place"
    assert resume(config, roles, str, newest).data == newest


@given(data=st.data())
def test_a_manifest_of_which_anything_was_changed_gives_way_to_the_checkpoint_before(
    data: st.DataObject,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        good, changed = (
            write(checkpoint_path(Path(folder), step), step, position=step)
            for step in (1, 2)
        )
        manifest = json.loads((changed / MANIFEST).read_text())
        field = data.draw(st.sampled_from(sorted(manifest.keys() - {"sha256"})))
        where = data.draw(
            st.sampled_from(
                [manifest, *(part for part in [manifest[field]] if isinstance(part, dict))]
            )
        )
        name = (
            field if where is manifest else data.draw(st.sampled_from([*where, "another"]))
        )
        value = data.draw(
            st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())
        )
        assume(name not in where or json.dumps(where[name]) != json.dumps(value))
        where[name] = value
        (changed / MANIFEST).write_text(json.dumps(manifest))
        assert checkpoints_at(Path(folder)) == [good]


def test_a_run_goes_on_from_before_a_checkpoint_whose_progress_is_another(
    tmp_path: Path,
) -> None:
    """An earlier version's manifest, which has no digest: the ranks load it, and the driver cannot."""
    paths = [write(checkpoint_path(tmp_path, step), step) for step in (1, 2)]
    progress = {str(path): read_manifest(path).extra for path in paths}
    progress[str(paths[1])] |= {"unheard_of": 1}
    roles = SimpleNamespace(
        trained={"policy": SimpleNamespace(load_checkpoint=lambda path: progress[path])}
    )
    config = load(
        None,
        ["model.path=m", "data.train=t", "reward.function=r:f", f"run.resume={tmp_path}"],
    )
    assert resume(config, roles, str, {}).step == 1


def test_a_run_that_begins_its_data_anew_keeps_its_model_and_later_checkpoints_go(
    tmp_path: Path,
) -> None:
    """The newest checkpoint cannot be loaded: a run that goes on from before it will write its name."""
    data: dict[str, Any] = {"settings": {"run.seed": 0}}
    for step in (1, 2, 3):
        write(
            checkpoint_path(tmp_path / "run", step), step, data=data, position=7, active=[5]
        )

    config = load(None, [*RESUMED, f"run.dir={tmp_path}", "run.on_data_change=restart"])
    roles = roles_that_refuse("step-3")
    same = resume(config, roles, str, data)
    assert (same.step, same.position, same.active) == (2, 7, [5])
    assert names(tmp_path / "run") == ["step-2", "step-1"]
    other = {"settings": {"run.seed": 1}}
    restarted = resume(config, roles, str, other)
    assert (restarted.step, restarted.position, restarted.active, restarted.data) == (
        2,
        0,
        [],
        other,
    )


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints_at(folder)]


def test_a_full_disk_is_said_and_counted_and_the_last_good_one_stays(
    tmp_path: Path,
) -> None:
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
    writer.at_stop(Progress(step=1))
    assert names(tmp_path) == ["step-1"]
    writer.begin(Progress(step=3))
    writer.at_stop(Progress(step=3))
    writer.at_stop(Progress(step=4))
    assert names(tmp_path) == ["step-4", "step-3"]
    assert said == [f"saving a checkpoint of step {step}" for step in (1, 4)]


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
    assert said == ["step-1 of step 1 has no room. The run continues."]


def test_samples_stay_with_the_checkpoints_that_they_belong_to(tmp_path: Path) -> None:
    steps = (1, 2, 3, 4)
    files = [
        of(checkpoint_path(tmp_path, step))
        for step in steps
        for of in (samples_path, replay_path)
    ]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    remove_old_samples(tmp_path)
    assert all(file.exists() for file in files)
    writer = CheckpointWriter(Saves(), tmp_path, keep=2, log=print)
    for step in (1, 3):
        writer.begin(Progress(step=step))
    remove_old_samples(tmp_path)
    assert [file.exists() for file in files] == [
        True,
        True,
        False,
        False,
        True,
        True,
        True,
        True,
    ]
