"""Bundles are written and read whole. Broken, foreign and hostile ones are refused in one line."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ballast.audit import read_bundle, record
from ballast.audit.bundle_files import bundles_of
from workers.errors import DataError

ROWS: dict[str, Any] = {
    "token_ids": [[5, 6, 7], [5, 8]],
    "loss_mask": [[0, 1, 1], [0, 1]],
    "old_logprobs": [[0, -1, -2], [0, -3]],
    "rewards": [1.0, 0.0],
    "group": [4, 4],
}


def write(folder: Path, **changes: Any) -> Path:
    return record(
        folder, **{"step": 3, "algorithm": {"clip_low": 0.2}, "loss": 0.5} | ROWS | changes
    )


def change_facts(folder: Path, **changes: Any) -> None:
    path = folder / "step.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "tokens.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def test_what_is_recorded_is_read_again(tmp_path: Path) -> None:
    bundle = read_bundle(
        write(tmp_path / "b", advantages=[0.5, -0.5], gradient_norm=[1.0, 2.0])
    )
    assert bundle.offsets.tolist() == [0, 3, 5]
    assert bundle.tokens["token_ids"].tolist() == [5, 6, 7, 5, 8]
    assert bundle.tokens["advantages"].tolist() == [0.5, 0.5, 0.5, -0.5, -0.5]
    assert bundle.rows["group"].tolist() == [4, 4]
    assert bundle.facts.loss == (0.5,)
    assert bundle.facts.gradient_norm == (1.0, 2.0)
    assert bundle.facts.algorithm.clip_low == 0.2
    assert bundle.facts.algorithm.clip_high is None


def test_columns_are_mapped_and_not_read(tmp_path: Path) -> None:
    bundle = read_bundle(write(tmp_path))
    assert isinstance(bundle.tokens["old_logprobs"], np.memmap)


def test_what_is_missing_is_named_with_its_reason(tmp_path: Path) -> None:
    bundle = read_bundle(write(tmp_path, missing={"new_logprobs": "not kept"}))
    assert bundle.missing["new_logprobs"] == "not kept"
    assert bundle.missing["advantages"] == "not given"
    assert "rewards" not in bundle.missing


def test_parts_are_whole_rows(tmp_path: Path) -> None:
    bundle = read_bundle(write(tmp_path))
    parts = list(bundle.parts(tokens=2))
    assert [start for start, _ in parts] == [0, 1]
    assert [part.tokens["token_ids"].tolist() for _, part in parts] == [[5, 6, 7], [5, 8]]
    assert [part.rows["rewards"].tolist() for _, part in parts] == [[1.0], [0.0]]


def test_a_folder_of_bundles_is_listed_by_step(tmp_path: Path) -> None:
    for step in (10, 2):
        write(tmp_path / f"step-{step}", step=step)
    assert [path.name for path in bundles_of(tmp_path)] == ["step-2", "step-10"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"loss_mask": [[0, 1], [0, 1]]}, "loss_mask: row 0"),
        ({"old_logprobs": [[0, -1, -2]]}, "old_logprobs: 1 rows"),
        ({"rewards": [1.0]}, "rewards: 1 values"),
        ({"log_probs": [[1], [2]]}, "log_probs: not a column"),
        ({"rewards": ["a", "b"]}, "rewards: not numbers"),
        ({"algorithm": {"clip": 0.2}}, "algorithm.clip: not a setting"),
        ({"missing": {"rewards": "lost"}}, "rewards is there"),
    ],
)
def test_what_does_not_fit_is_not_recorded(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(DataError, match=named):
        write(tmp_path / "b", **changes)
    assert not (tmp_path / "b" / "step.json").exists()


def _cut(folder: Path) -> None:
    path = folder / "tokens.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def _pickle(folder: Path) -> None:
    np.save(folder / "tokens.npy", np.array([object()]), allow_pickle=True)
    (folder / "tokens.npy").rename(folder / "tokens.safetensors")


def _rename_column(name: str) -> Callable[[Path], None]:
    def break_bundle(folder: Path) -> None:
        change_header(folder, lambda header: header.update({name: header.pop("rewards")}))

    return break_bundle


def _change_column(**changes: Any) -> Callable[[Path], None]:
    def break_bundle(folder: Path) -> None:
        change_header(folder, lambda header: header["rewards"].update(changes))

    return break_bundle


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no facts": (lambda folder: (folder / "step.json").unlink(), "no such file"),
    "no tokens": (lambda folder: (folder / "tokens.safetensors").unlink(), "no such file"),
    "cut facts": (
        lambda folder: (folder / "step.json").write_text('{"format": "bal'),
        "not JSON",
    ),
    "nested facts": (
        lambda folder: (folder / "step.json").write_text("[" * 100_000),
        "nested too deep",
    ),
    "binary facts": (
        lambda folder: (folder / "step.json").write_bytes(b"\xff\x00"),
        "not JSON",
    ),
    "other format": (lambda folder: change_facts(folder, format="verl"), "ballast-step"),
    "later version": (lambda folder: change_facts(folder, version=2), "version=2"),
    "step a text": (lambda folder: change_facts(folder, step="3"), "step is '3'"),
    "step infinite": (
        lambda folder: change_facts(folder, step=float("inf")),
        "step is inf",
    ),
    "loss a mapping": (lambda folder: change_facts(folder, loss={"a": 1}), "loss is"),
    "algorithm a list": (lambda folder: change_facts(folder, algorithm=[]), "algorithm is"),
    "unknown setting": (
        lambda folder: change_facts(folder, algorithm={"clip": 1}),
        "algorithm.clip",
    ),
    "facts of another step": (
        lambda folder: change_facts(folder, tokens=6),
        "different steps",
    ),
    "contradiction": (
        lambda folder: change_facts(folder, missing={"rewards": ""}),
        "rewards is there",
    ),
    "hostile missing": (
        lambda folder: change_facts(folder, missing={"\x1b[2J": ""}),
        "missing names",
    ),
    "cut tokens": (_cut, "not a whole safetensors file"),
    "pickle": (_pickle, "header has|not a whole safetensors file"),
    "huge header": (
        lambda folder: (folder / "tokens.safetensors").write_bytes(
            struct.pack("<Q", 2**62)
        ),
        "its header has",
    ),
    "hostile name": (_rename_column("../../x"), "a column is named"),
    "steering name": (_rename_column("\x1b[2J"), "a column is named"),
    "huge column": (_change_column(shape=[2**60]), "not a whole safetensors file"),
    "huge places": (
        _change_column(data_offsets=[0, 2**62]),
        "not a whole safetensors file",
    ),
    "two dimensions": (_change_column(shape=[1, 2]), "has the shape"),
    "brain floats": (_change_column(dtype="BF16", shape=[8]), "has the type 'BF16'"),
    "floats as group": (
        lambda folder: change_header(
            folder,
            lambda header: header.update(group=header["rewards"], rewards=header["group"]),
        ),
        "group has the type float64",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_bundle_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    break_bundle, named = BROKEN[case]
    folder = write(tmp_path / "b")
    break_bundle(folder)
    with pytest.raises(DataError, match=named) as error:
        read_bundle(folder)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("offsets", [[], [1, 3, 5], [0, 4, 3, 5], [0, 3, 6], [0, 5]])
def test_offsets_that_do_not_fit_are_refused(tmp_path: Path, offsets: list[int]) -> None:
    from safetensors.numpy import load_file, save_file

    folder = write(tmp_path / "b")
    path = folder / "tokens.safetensors"
    save_file(load_file(path) | {"offsets": np.array(offsets, np.int64)}, path)
    with pytest.raises(DataError):
        read_bundle(folder)
