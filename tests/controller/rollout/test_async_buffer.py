"""Groups that are generated ahead: the real buffer and schedule over engines and rewards that
answer at once.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray

from controller.rollout import async_buffer as async_buffer
from controller.rollout.async_buffer import AsyncRolloutBuffer
from controller.rollout.sample_files import read_samples
from controller.rollout.samples import RolloutBatch
from tests.controller.stand_ins.roles import LocalRun
from workers.batch.dataproto import DataProto
from workers.batch.score import Score
from workers.engine.requests import Response
from workers.errors import RolloutError

Run = Callable[..., LocalRun]
AHEAD = ("rollout.max_staleness=1", "rollout.out_of_order_window=1", "run.steps=4")


def buffer_of(run: LocalRun) -> AsyncRolloutBuffer:
    buffer = run.run.buffer
    assert isinstance(buffer, AsyncRolloutBuffer)
    buffer.begin()
    buffer.read()
    return buffer


class ObjectStore:
    """`ray.get` and `ray.put`: of blocks that engines made, every row has eight tokens."""

    def __init__(self) -> None:
        row = {
            "input_ids": np.arange(8, dtype=np.int32),
            "loss_mask": np.repeat([False, True], 4),
        }
        self.blocks: dict[str, DataProto] = {"block": DataProto.from_rows([row] * 8)}

    def get(self, refs: str | list[str]) -> DataProto | list[DataProto]:
        return (
            self.blocks[refs]
            if isinstance(refs, str)
            else [self.blocks[ref] for ref in refs]
        )

    def put(self, block: DataProto) -> str:
        self.blocks[f"put {len(self.blocks)}"] = block
        return f"put {len(self.blocks) - 1}"


def uids(rollout: RolloutBatch) -> list[str]:
    return sorted(set(rollout.trained["uid"].tolist()), key=int)


def test_groups_of_two_steps_are_under_way_and_more_follow_at_once_with_new_weights(
    local_run: Run,
) -> None:
    """Not only when the driver waits for long: an engine would idle during short steps."""
    found = local_run(*AHEAD)
    buffer = buffer_of(found)
    assert (buffer.position, buffer.active) == (4, [0, 1, 2, 3])
    assert uids(buffer.collect(1)) == ["0", "1"]
    assert (buffer.position, buffer.active) == (4, [2, 3])
    found.engines.slow = {"4", "5"}
    buffer.weights_updated()
    assert (buffer.position, buffer.active) == (6, [2, 3, 4, 5])
    assert asked(buffer) == {"4", "5"}


def asked(buffer: AsyncRolloutBuffer) -> set[str]:
    """Prompts whose requests the engines have."""
    router = buffer._generation.router
    assert router.waiting == 0
    return {request.uid for request in router.unfinished}


@pytest.mark.parametrize(("window", "first"), [(1, ["1", "2"]), (0.1, ["0", "1"])])
def test_a_slow_group_is_passed_within_the_window_and_trained_later(
    local_run: Run, window: float, first: list[str]
) -> None:
    found = local_run(*AHEAD, f"rollout.out_of_order_window={window}")
    found.engines.slow = {"0"}
    buffer = buffer_of(found)
    assert uids(buffer.collect(1)) == first
    buffer.weights_updated()
    found.engines.slow = set()
    assert uids(buffer.collect(2)) == [uid for uid in "0123" if uid not in first]


def test_seeds_are_those_of_a_run_without_staleness(local_run: Run) -> None:
    ahead, now = local_run(*AHEAD), local_run()
    requests = []
    submit = ahead.engines._generation.router.submit
    ahead.engines._generation.router.submit = lambda new: (
        requests.extend(new),
        submit(new),
    )  # type: ignore[func-returns-value, method-assign]
    buffer_of(ahead)
    now.run.buffer.collect(1)
    now.run.buffer.collect(2)
    assert [r.seed for r in requests] == [
        r.seed for found, _ in now.engines.rounds for r in found
    ]


def test_every_prompt_is_trained_once_and_none_beyond_the_last_step(local_run: Run) -> None:
    found = local_run(*AHEAD)
    found.engines.slow = {"1", "4"}
    found.fit()
    trained = [
        uid for batch, _ in found.policy.updates for uid in batch["uid"].tolist()[::2]
    ]
    assert sorted(map(int, trained)) == list(range(8))
    assert found.run.buffer.position == 8


def test_groups_without_signal_are_replaced_at_once(local_run: Run) -> None:
    found = local_run(
        *AHEAD, "algorithm.zero_variance_groups=replace", "algorithm.max_sampling_rounds=4"
    )
    found.rewards.reward = lambda uid, sample, greedy: float(
        sample if uid in ("1", "3") else 1
    )
    found.engines.slow = {"0", "4", "5"}
    buffer = buffer_of(found)
    found.engines.slow = {"4", "5"}
    buffer.read()
    assert asked(buffer) == {"4", "5"}
    collected = buffer.collect(1)
    assert uids(collected) == ["1", "3"]
    assert {"0", "2"} <= set(collected.batch["uid"].tolist())  # metrics are of all samples


@pytest.mark.parametrize(("rounds", "replaced"), [(2, 2), (3, 4)])
def test_as_many_groups_are_replaced_as_the_rounds_allow(
    local_run: Run, rounds: int, replaced: int
) -> None:
    """Four groups are under way, and each one that is replaced admits another."""
    found = local_run(
        *AHEAD,
        "algorithm.zero_variance_groups=replace",
        f"algorithm.max_sampling_rounds={rounds}",
    )
    found.rewards.reward = lambda uid, sample, greedy: float(sample if uid == "1" else 1)
    buffer = buffer_of(found)
    assert uids(buffer.collect(1)) == ["1"]
    assert buffer.position == 4 + replaced


def test_samples_that_fail_are_counted_and_a_step_of_them_alone_is_an_error(
    local_run: Run,
) -> None:
    found = local_run(*AHEAD)
    found.engines.failing = {"1", "2", "3"}
    buffer = buffer_of(found)
    collected = buffer.collect(1)
    assert (uids(collected), collected.dropped) == (["0"], 2)
    with pytest.raises(RolloutError, match="no such token"):
        buffer.collect(2)


def test_what_engines_finish_is_read_while_the_driver_waits_for_the_ranks(
    local_run: Run,
) -> None:
    found = local_run(*AHEAD)
    buffer = buffer_of(found)
    meanwhile = found.policy.meanwhile
    assert meanwhile is not None
    meanwhile()
    assert buffer.schedule.take() == [0, 1]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    found = ObjectStore()
    monkeypatch.setattr(async_buffer, "ray", found)
    monkeypatch.setattr(ray, "get", found.get)
    return found


def interrupted(run: LocalRun) -> AsyncRolloutBuffer:
    """After a step, with group 2 begun and the others finished."""
    run.engines.slow = {"2"}
    buffer = buffer_of(run)
    assert uids(buffer.collect(1)) == ["0", "1"]
    buffer.weights_updated()
    buffer.read()
    part = Response(
        np.array([7, 8], np.int32),
        np.array([-1.0, -2.0], np.float32),
        np.array([0, 1], np.int32),
    )
    run.engines.parts = {
        request.attempt: part for request in buffer._generation.router.unfinished
    }
    return buffer


def resumed(run: LocalRun, old: AsyncRolloutBuffer, samples: str) -> AsyncRolloutBuffer:
    """The buffer of another run, from the old one's place."""
    inner = run.run
    progress = replace(
        inner.progress, position=old.position, active=old.active, samples=samples, step=1
    )
    buffer = AsyncRolloutBuffer(
        run.config, inner.roles, inner.buffer.prompts, inner.planner, inner.record, progress
    )
    buffer.begin()
    return buffer


def test_a_checkpoint_keeps_what_is_finished_and_the_beginnings_of_the_rest(
    local_run: Run, store: ObjectStore, tmp_path: Path
) -> None:
    old = interrupted(local_run(*AHEAD))
    old.save(tmp_path / "samples.npz", old.active)
    stored = read_samples(tmp_path / "samples.npz")
    assert [sample.result.key for sample in stored.finished] == [
        (uid, i) for uid in ("3", "4", "5") for i in (0, 1)
    ]
    assert [
        row["input_ids"].tolist() for sample in stored.finished for row in sample.rows
    ] == [list(range(8))] * 6
    assert all(sample.score is not None for sample in stored.finished)

    run = local_run(*AHEAD)
    run.engines.slow = {"2"}
    new = resumed(run, old, str(tmp_path / "samples.npz"))
    new.read()
    asked = {request.key: request.begun for request in new._generation.router.unfinished}
    assert sorted(asked) == [("2", 0), ("2", 1)]
    for begun in asked.values():
        assert begun is not None
        assert (begun.ids.tolist(), begun.versions.tolist()) == ([7, 8], [0, 1])
    run.engines.slow = set()
    new.read()
    assert uids(new.collect(2)) == ["2", "3"]
    assert store.get("put 1").row(1)["input_ids"].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("settings", "expected"), [([], ""), (["run.record_samples=true"], "text")]
)
def test_samples_of_a_checkpoint_without_texts_are_scored_again_if_these_are_read(
    local_run: Run, store: ObjectStore, tmp_path: Path, settings: list[str], expected: str
) -> None:
    before = local_run(*AHEAD)
    before.rewards.reward = lambda uid, sample, greedy: Score(float(sample), "")
    old = interrupted(before)
    old.save(tmp_path / "samples.npz", old.active)
    new = resumed(local_run(*AHEAD, *settings), old, str(tmp_path / "samples.npz"))
    new.read()
    found = new._groups[3].scores
    assert {key: score.response for key, score in found.items()} == {
        ("3", 0): expected,
        ("3", 1): expected,
    }


def test_a_checkpoint_whose_samples_are_broken_has_them_made_again(
    local_run: Run, store: ObjectStore, tmp_path: Path
) -> None:
    old, path = interrupted(local_run(*AHEAD)), tmp_path / "samples.npz"
    path.write_bytes(b"PK cut")
    run = local_run(*AHEAD)
    new = resumed(run, old, str(path))
    assert "samples.npz cannot be read" in run.said
    assert uids(new.collect(2)) == ["2", "3"]
    assert list(store.blocks) == ["block"]
