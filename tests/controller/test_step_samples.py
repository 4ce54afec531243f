"""The samples of a step in a file."""

from datetime import date
from pathlib import Path

import numpy as np
import pytest

from controller.observability.metrics import RunWriter
from controller.observability.run_folder import recorded_steps, step_file
from controller.step_samples import StepSamples, read_step, write_step
from workers.dataproto import DataProto, object_column
from workers.errors import DataError, OutputError
from workers.score import Score

ROWS = [
    {"input_ids": np.arange(4, dtype=np.int32), "loss_mask": np.array([False, False, True, True])},
    {"input_ids": np.array([7], dtype=np.int32), "loss_mask": np.array([True])},
]


def samples(**added: np.ndarray) -> StepSamples:
    return StepSamples(
        DataProto.from_rows(ROWS),
        {"uid": np.array(["a", "ü"]), "sample": np.array([0, 1]), "seconds": np.array([0.1, 1 / 3])},
        [Score(1 / 3, "yes", {"exact": 1.0}, answer="4"), Score(0.0, "", failure="f: raised")],
        np.array([1, 0]),
        added,
    )


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    """To the last bit and in the same types, also records' values that are neither numbers nor text."""
    path = tmp_path / "samples" / "step-3.npz"
    added = {"level": np.array([2.0, 1.0]), "tests": object_column([["a"], [{"b": None}]])}
    before = samples(**added)
    write_step(path, before)
    found = read_step(path)
    assert [path.name for path in path.parent.iterdir()] == ["step-3.npz"]
    assert (found.scores, found.trained.tolist()) == (before.scores, [1, 0])
    pairs = [(found.columns, before.columns), (found.added, added), (found.tokens.columns, before.tokens.columns)]
    for columns, expected in pairs:
        assert columns.keys() == expected.keys()
        for name, column in expected.items():
            assert (columns[name].tolist(), columns[name].dtype) == (column.tolist(), column.dtype)
    assert found.tokens.offsets.tolist() == [0, 4, 5]


def test_a_value_that_json_does_not_have_is_refused_by_its_column(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"algorithm.loss.columns=when: .*date is not JSON serializable"):
        write_step(tmp_path / "step-1.npz", samples(when=object_column([date(2026, 1, 1), "b"])))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_missing_or_broken_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "step-1.npz"
    with pytest.raises(DataError, match=r"step-1.npz cannot be read as the samples of a step"):
        read_step(path)
    write_step(path, samples())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"step-1.npz cannot be read as the samples of a step"):
        read_step(path)


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "samples").touch()
    with pytest.raises(OutputError, match=r"samples/step-1.npz could not be written"):
        write_step(step_file(tmp_path, 1), samples())


def test_a_run_that_resumes_forgets_the_samples_of_later_steps(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        write_step(step_file(tmp_path, step), samples())
    with RunWriter(tmp_path, "", [], after=2):
        assert recorded_steps(tmp_path) == [1, 2]
    with RunWriter(tmp_path, "", []):
        assert recorded_steps(tmp_path) == []
