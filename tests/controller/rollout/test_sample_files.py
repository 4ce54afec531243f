"""The samples of a step in a file."""

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.core.generated.common_pb2 import Address

from controller.observability.run_folder import RunWriter, recorded_steps, step_file
from controller.rollout.sample_files import (
    FinishedSample,
    StoredSamples,
    read_samples,
    read_step,
    write_log_probs,
    write_rows,
    write_samples,
    write_step,
    write_update,
)
from controller.rollout.samples import RolloutBatch
from controller.rollout.update_record import UpdateRecord
from tests.refusals import refused
from workers.agents.session import Session
from workers.batch.dataproto import DataProto, object_column
from workers.batch.placed_images import Image, PlacedImage
from workers.batch.remote_batch import RemoteBatch, fetch_images, places
from workers.batch.score import Score
from workers.engine.branches import branches_of
from workers.engine.prefix_hashes import prefix_hashes
from workers.engine.requests import Response, SampleResult
from workers.errors import DataError, LostError, OutputError

ROWS = [
    [
        {"input_ids": np.arange(6, dtype=np.int32), "loss_mask": np.arange(6) > 2},
        {"input_ids": np.array([0, 1, 9, 3], np.int32), "loss_mask": np.arange(4) > 2},
        {"input_ids": np.array([0, 8, 3, 4, 5], np.int32), "loss_mask": np.arange(5) > 2},
    ],
    [{"input_ids": np.array([7], dtype=np.int32), "loss_mask": np.array([True])}],
]
"""A sample whose second turn is a branch, and one of one row."""


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are the blocks themselves."""
    monkeypatch.setattr("controller.rollout.sample_files.ray.get", lambda refs: refs)


class Block(DataProto):
    """Stands for its own reference."""

    __hash__ = object.__hash__


def samples(**added: np.ndarray) -> RolloutBatch:
    """Two samples, of which both are trained, the second first."""
    rows = DataProto.from_rows([*ROWS[0], *ROWS[1]])
    columns = {
        "uid": np.array(["a", "ü"]),
        "sample": np.array([0, 1]),
        "seconds": np.array([0.1, 1 / 3]),
    }
    columns |= {
        "prompt_tokens": np.array([2, 0]),
        "cut_tokens": np.array([0, 0]),
        "history_refused": np.array([0, 0]),
        "prompt_hash": np.array([5, 6]),
    }
    columns |= {"length": np.array([6, 1]), "response_tokens": np.array([3, 1])}
    columns["prefix_hashes"] = object_column(
        [
            prefix_hashes(first["input_ids"], n)
            for (first, *_), n in zip(ROWS, (2, 0), strict=True)
        ]
    )
    columns["branches"] = object_column([branches_of(found, 2) for found in ROWS])
    scores = [
        Score(1 / 3, "yes", {"exact": 1.0}, answer="4"),
        Score(0.0, "", failure="f: raised"),
    ]
    block = Block(rows.lengths, rows.tokens)
    batch = RemoteBatch(
        columns,
        {name: places(name, [block] * 2, [0, 3]) for name in ("input_ids", "loss_mask")},
    )
    rollout = RolloutBatch(
        batch, {("a", 0): scores[0], ("ü", 1): scores[1]}, dropped=0, retried=0
    )
    return replace(rollout, trained=rollout.rows.select([2, 0, 1]).with_columns(**added))


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    """To the last bit and in the same types, also records' values that are neither numbers nor text."""
    path = tmp_path / "samples" / "step-3.npz"
    before = samples(
        level=np.array([2.0, 1.0, 1.0]), tests=object_column([["a"], [{"b": None}], [3]])
    )
    write_step(path, before)
    found = read_step(path, put=lambda block: block)
    assert [path.name for path in path.parent.iterdir()] == ["step-3.npz"]
    assert found.by_sample == before.by_sample
    assert list(found.by_sample) == list(before.by_sample)
    assert found.trained["length"].tolist() == [1, 4, 5]
    # As far as a row begins with the sample's prompt.
    assert found.trained["prompt_tokens"].tolist() == [0, 2, 1]
    assert [row for _, _, row in found.trained.tokens["loss_mask"]] == [3, 1, 2]
    block, written = (
        rollout.samples.tokens["input_ids"][0][0] for rollout in (found, before)
    )
    pairs = [
        (found.samples.columns, before.samples.columns),
        (found.trained.columns, before.trained.columns),
    ]
    for columns, expected in [*pairs, (block.tokens, written.tokens)]:
        assert columns.keys() == expected.keys()
        for name, column in expected.items():
            assert (columns[name].tolist(), columns[name].dtype) == (
                column.tolist(),
                column.dtype,
            )
    assert block.offsets.tolist() == [0, 6, 10, 15, 16]


def test_untrained_samples_of_a_checkpoint_keep_their_branches(tmp_path: Path) -> None:
    hashes = prefix_hashes(ROWS[0][0]["input_ids"], 2)
    facts = {"prefix_hashes": hashes, "branches": branches_of(ROWS[0], 2)}
    results = [
        SampleResult("a", 0, 2, 3, "stop", 0, row=0, **facts),
        SampleResult("b", 1, 0, 1, "stop", 0, row=3),
    ]
    before = [
        FinishedSample(result, rows, None)
        for result, rows in zip(results, ROWS, strict=True)
    ]
    write_samples(
        tmp_path / "step-1.npz",
        StoredSamples([*before, FinishedSample(replace(results[0], row=-1), [], None)]),
    )
    *found, dropped = read_samples(tmp_path / "step-1.npz").finished
    assert [sample.result for sample in found] == results
    assert dropped.rows == []
    for sample, rows in zip(found, ROWS, strict=True):
        assert [row["input_ids"].tolist() for row in sample.rows] == [
            row["input_ids"].tolist() for row in rows
        ]


def test_unfinished_responses_and_sessions_of_a_checkpoint_are_whole(
    tmp_path: Path,
) -> None:
    """What the stored session answers to the same prompts, and so trains, is what the first one
    would have.
    """

    def sampled(*ids: int) -> Response:
        found = np.array(ids, np.int32)
        routed = np.arange(12, dtype=np.int16).reshape(6, 2, 1)
        return Response(
            found,
            found / -3,
            found % 2,
            "stop",
            4,
            cached_tokens=1,
            routed_experts=routed,
            stop_string=True,
        )

    session, prompt = Session("s", max_turns=9), np.arange(3, dtype=np.int32)
    chat: list[dict[str, Any]] = [{"role": "user", "content": "ü"}]
    for ids, name in (((3, 4), "a"), ((5,), "b")):
        with session.sampling() as number:
            asked, said = session.find(chat), {"role": "assistant", "content": name}
            node = session.add(
                asked,
                prompt,
                sampled(*ids),
                number=number,
                message=said,
                text=name,
                name=name,
            )
        node.received = True
        chat, prompt = (
            [*chat, said, {"role": "user", "content": "?"}],
            np.append(session.ids(node), np.int32(9)),
        )
    session.reward(0.5, "a")
    before = {
        7: session.snapshot(),
        2**62: sampled(1, 2),
        8: Session("t", max_turns=1).snapshot(),
    }
    write_samples(tmp_path / "step-1.npz", StoredSamples([], before))
    found = read_samples(tmp_path / "step-1.npz").partial
    assert found.keys() == before.keys()
    assert found[2**62].ids.tolist() == [1, 2]
    again = Session("s", max_turns=9, record=found[7], goes_on=True)
    assert again.describe_turns() == session.describe_turns()
    assert again.credit() == session.credit()
    for row, expected in zip(again.rows(), session.rows(), strict=True):
        assert {name: (column.tolist(), column.dtype) for name, column in row.items()} == {
            name: (column.tolist(), column.dtype) for name, column in expected.items()
        }
    chat = [{"role": "user", "content": "ü"}]
    first = Session("s", max_turns=9, record=found[7])
    answer = first.claim_recorded(first.find(chat), np.arange(3, dtype=np.int32))
    assert answer is not None
    assert (answer.response.stop_string, answer.response.finish_reason, first.kept) == (
        True,
        "stop",
        [],
    )


def test_the_last_row_of_each_sample_is_what_a_reward_model_scores() -> None:
    assert [row for _, _, row in samples().last_rows.tokens["input_ids"]] == [2, 3]


def test_a_value_that_json_does_not_have_is_refused_by_its_column(tmp_path: Path) -> None:
    with refused("algorithm.loss.columns=when", DataError):
        write_step(
            tmp_path / "step-1.npz",
            samples(when=object_column([date(2026, 1, 1), "b", "b"])),
        )
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_missing_broken_or_cannot_be_written_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "step-1.npz"
    with refused("step-1.npz", DataError):
        read_step(path)
    write_step(path, samples())
    path.write_bytes(path.read_bytes()[:-100])
    with refused("step-1.npz", DataError):
        read_step(path)
    (tmp_path / "samples").touch()
    with refused("samples/step-1.npz", OutputError):
        write_step(step_file(tmp_path, 1), samples())


def images_of_a_node() -> np.ndarray:
    image = Image(1, 8, 8, ray.ObjectRef(b"0" * 28))
    return object_column([(PlacedImage(image, 0, 1),)])


FETCHES: dict[str, Callable[[Path], Any]] = {
    "write_step": lambda path: write_step(path, samples()),
    "write_update": lambda path: write_update(
        path,
        samples().samples.with_tokens(advantages=samples().samples.tokens["input_ids"]),
        [],
    ),
    "write_log_probs": lambda path: write_log_probs(
        path, UpdateRecord(samples().samples.tokens["input_ids"])
    ),
    "write_rows": lambda path: write_rows(path, samples().samples),
    "gather": lambda _: samples().samples.gather(),
    "images": lambda _: fetch_images(images_of_a_node()),
}
"""What fetches tokens or images on the driver."""


@pytest.mark.parametrize("name", FETCHES)
def test_tokens_of_a_lost_node_end_the_attempt_and_not_the_program(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(refs: list[Any]) -> None:
        raise ray.exceptions.ObjectLostError("00", Address(), "")

    monkeypatch.setattr(ray, "get", lose)
    with refused("a node that was lost", LostError):
        FETCHES[name](tmp_path / "step-1.npz")
    assert not list(tmp_path.iterdir())


def test_a_run_that_resumes_forgets_the_samples_of_later_steps(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        write_step(step_file(tmp_path, step), samples())
    with RunWriter(tmp_path, "", [], last_step=2):
        assert recorded_steps(tmp_path) == [1, 2]
    with RunWriter(tmp_path, "", []):
        assert recorded_steps(tmp_path) == []
