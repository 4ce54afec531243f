"""Checkpoints of clients: names of folders, what is listed, and what a kill leaves of a deletion."""

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.serve.checkpoints import Checkpoints, path_of, state_of
from ballast.serve.wire import NAME, RefusedError
from tests.refusals import refused
from workers.model.checkpoint.checkpoint_folder import MANIFEST, unfinished_folder

MODEL = "0123456789abcdef0123456789abcdef:train:0"
models = st.from_regex(
    re.compile("[0-9a-f]{32}:train:[0-9]{1,3}", re.ASCII), fullmatch=True
)
names = st.from_regex(re.compile(NAME.pattern, re.ASCII), fullmatch=True)


def write(states: Path, state: str, at: float, size: int = 10) -> None:
    folder = states / state / "policy"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    (folder / "weights").write_bytes(bytes(size - 2))
    os.utime(folder / MANIFEST, (at, at))


@settings(max_examples=50)
@given(st.sets(st.tuples(models, names), min_size=1, max_size=4))
def test_a_folder_says_which_path_it_has(saved: set[tuple[str, str]]) -> None:
    paths = {path_of({"model_id": model, "path": name}, "weights") for model, name in saved}
    with TemporaryDirectory() as folder:
        for path in paths:
            write(Path(folder), state_of(path), 1.0)
        found = [each["tinker_path"] for each in Checkpoints(Path(folder)).all()]
    assert sorted(found) == sorted(paths)


@given(
    st.one_of(
        st.text(),
        st.tuples(models, st.text()).map("/weights/".join).map("tinker://{}".format),
    )
)
def test_no_path_names_a_folder_elsewhere(path: str) -> None:
    assert re.fullmatch(r"([0-9a-f]{32}\.train\.[0-9]+\.[A-Za-z0-9_.-]+)?", state_of(path))


def test_states_and_samplers_are_listed_newest_first(tmp_path: Path) -> None:
    found, other = Checkpoints(tmp_path), MODEL[:-1] + "01"
    states = [
        state_of(f"tinker://{MODEL}/weights/{name}")
        for name in ("a", "b", "torn", "deleted")
    ]
    for number, state in enumerate(states):
        write(tmp_path, state, 10.0 * number, size=100 + number)
    (tmp_path / states[2] / "policy" / MANIFEST).unlink()
    found.deleted.add(f"tinker://{MODEL}/weights/deleted")
    write(tmp_path, "initial", 50.0)
    write(tmp_path, unfinished_folder(tmp_path / states[0]).name, 60.0)
    found.samplers = {f"tinker://{other}/sampler_weights/c": (other, 7, 5.0)}
    facts = [
        (each["checkpoint_id"], each["checkpoint_type"], each["time"], each["size_bytes"])
        for each in found.all()
    ]
    of_states = [("weights/b", "training", 10.0, 101), ("weights/a", "training", 0.0, 100)]
    of_sampler = ("sampler_weights/c", "sampler", 5.0, None)
    assert facts == [of_states[0], of_sampler, of_states[1]]
    assert [each["checkpoint_id"] for each in found.all(MODEL)] == [
        "weights/b",
        "weights/a",
    ]
    assert [each["checkpoint_id"] for each in found.all(other)] == ["sampler_weights/c"]


def test_a_deletion_is_finished_and_nothing_else_removed(tmp_path: Path) -> None:
    found, paths = (
        Checkpoints(tmp_path),
        [f"tinker://{MODEL}/weights/{name}" for name in ("a", "b")],
    )
    for path in paths:
        write(tmp_path, state_of(path), 1.0)
    write(tmp_path, unfinished_folder(tmp_path / "x").name, 1.0)
    found.deleted = {
        paths[0],
        f"tinker://{MODEL}/sampler_weights/b",
        "tinker://../weights/..",
    }
    with refused(paths[0], RefusedError):
        found.state(paths[0])
    for _ in range(2):
        found.remove_deleted()
        assert (
            [each.name for each in tmp_path.iterdir()]
            == [state_of(paths[1])]
            == [found.state(paths[1])]
        )


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", ".hidden", "x" * 101, "a\n", "ä", None, 3]
)
def test_other_names_than_those_of_files_are_refused(name: object) -> None:
    with pytest.raises(RefusedError):
        path_of({"model_id": MODEL, "path": name}, "weights")
