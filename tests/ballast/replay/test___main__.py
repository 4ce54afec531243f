"""A recorded step again: the batch that is trained, where a replay begins, and what the command refuses."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from balancing import CostModel
from ballast.replay.__main__ import (
    Start,
    comparison,
    main,
    open_recorded_run,
    replay,
    replay_settings,
    settings,
    start_before,
    train_again,
)
from controller.checkpoints.progress import checkpoint_path
from controller.config import Config, load, to_yaml
from controller.engines.engine_pool import EnginePool
from controller.observability.console import Console
from controller.observability.run_folder import RunFolder, recorded_steps, step_file
from controller.preflight.checks import check_layout
from controller.run import Run
from controller.step import step
from tests.controller.stand_ins.roles import TOKENS, LocalRun, write
from tests.controller.stand_ins.run import StandInRun, StandIns
from workers.batch.dataproto import DataProto
from workers.batch.remote_batch import RemoteBatch
from workers.config.roles import RolloutConfig
from workers.errors import DataError, MismatchError

NewRun = Callable[..., LocalRun]
Replay = Callable[..., "LocalReplay"]
RECORDED = ("run.record_samples=true", "batch.mini_batches=2")


class Store:
    """The object store: what was put there, and blocks of 100 rows, no two alike, for the names
    of stand-ins.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def put(self, value: Any) -> str:
        self.values[f"put {len(self.values)}"] = value
        return list(self.values)[-1]

    def get(self, refs: list[str]) -> list[Any]:
        return [self.values.setdefault(ref, block(len(self.values))) for ref in refs]

    def ids(self, batch: RemoteBatch) -> list[list[int]]:
        """Token ids of every row."""
        places = batch.tokens["input_ids"]
        return [self.get([ref])[0].row(row)["input_ids"].tolist() for ref, _, row in places]


def block(number: int) -> DataProto:
    length = 2 * TOKENS
    ids = 10_000 * number + np.arange(100 * length, dtype=np.int32)
    columns = {
        "input_ids": ids,
        "loss_mask": ids % 2 == 1,
        "rollout_log_probs": -ids.astype(np.float32),
    }
    for name in ("policy log_probs", "reference log_probs", "critic advantages"):
        columns[name] = -ids.astype(np.float32)
    return DataProto(np.full(100, length), columns | {"weight_versions": ids})


class LocalReplay(LocalRun):
    """A replay on roles that answer at once."""

    def _run(self, config: Config) -> Run:
        config = replay_settings(config, Start(None, range(1, 2)))
        session = self._session(
            config, EnginePool(lambda replica, attempt: None, RolloutConfig(replicas=0))
        )
        return open_recorded_run(config, session, self.folder, CostModel(1.0, 0.0))

    def all_of(self, run: LocalRun) -> None:
        """Every step that the run has recorded."""
        self.run.buffer.folder = run.folder  # type: ignore[attr-defined]
        train_again(self.run, recorded_steps(run.folder), step)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    found = Store()
    monkeypatch.setattr(ray, "put", found.put)
    monkeypatch.setattr(ray, "get", found.get)
    return found


@pytest.fixture
def local_replay(store: Store, tmp_path: Path) -> Iterator[Callable[..., LocalReplay]]:
    """A replay of runs, from overrides."""
    with ExitStack() as stack:
        yield lambda *overrides: stack.enter_context(
            closing(LocalReplay(tmp_path / "replay", *overrides))
        )


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("batch.split_by=group",),
        ("algorithm.advantage=remax",),
        ("algorithm.loss.columns='level,prompt'",),
        ("rollout.max_staleness=1",),
        ("algorithm.advantage=gae", "critic.warmup_steps=1"),
        ("reward.overlong_tokens=2",),
        ("algorithm.zero_variance_groups=replace",),
        ("batch.replay.share=0.5",),
    ],
    ids=lambda overrides: overrides[0] if overrides else "plain",
)
def test_every_step_gets_the_rows_columns_and_mini_batches_that_it_had(
    local_run: NewRun, local_replay: Replay, store: Store, overrides: tuple[str, ...]
) -> None:
    found = local_run(*RECORDED, *overrides)
    # Some groups have no signal.
    found.rewards.reward = lambda uid, sample, greedy: float(sample * (int(uid) % 3))
    found.fit()
    again = local_replay(*RECORDED, *overrides)
    again.all_of(found)
    assert len(mini_batches_of(again)) == len(mini_batches_of(found)) > 0
    for batch, before in zip(mini_batches_of(again), mini_batches_of(found), strict=True):
        assert batch.columns.keys() == before.columns.keys()
        # Of the tokens; stand-ins of engines have none.
        for name in before.columns.keys() - {"prefix_hashes"}:
            np.testing.assert_array_equal(batch[name], before[name], name)
            assert batch[name].dtype == before[name].dtype, name
        assert batch.meta == before.meta
        assert store.ids(batch) == store.ids(before)
    assert again.run.progress.weight_version == found.run.progress.weight_version
    assert again.of("generate", "weights") == []


def mini_batches_of(run: LocalRun) -> list[RemoteBatch]:
    """The rows of every optimiser step, in the order of their plan. A recorded run sends each apart."""
    batches = []
    for batch, plan in run.policy.updates:
        batches += [batch.select(mini_batch.rows) for mini_batch in plan.mini_batches]
    return batches


def test_a_mismatch_stops_a_run_and_is_told_by_its_replay(
    local_run: NewRun, local_replay: Replay
) -> None:
    found = local_run(*RECORDED)
    found.policy.mismatch = 9.0
    with pytest.raises(MismatchError):
        found.fit()
    again = local_replay(*RECORDED)
    again.policy.mismatch = 9.0
    again.all_of(found)
    assert len(again.policy.updates) == 1
    assert "step 1: log-probs of engines and trainer differ by 9 nats" in again.said


def test_a_replay_ends_its_steps_as_the_run_did_but_saves_nothing(
    local_run: NewRun, local_replay: Replay
) -> None:
    saving = ("run.save_every=1", "run.checkpoint_every=1")
    recorded_run = local_run(*RECORDED, *saving)
    recorded_run.fit()
    again = local_replay(*RECORDED, *saving)
    again.all_of(recorded_run)
    steps = RunFolder(again.folder).metrics
    assert [row["step"] for row in steps] == recorded_steps(recorded_run.folder)
    assert again.run.progress.step == len(steps)
    assert not [path for path in again.folder.iterdir() if path.is_dir()]


def test_a_run_keeps_no_samples_unless_it_is_asked_to(local_run: NewRun) -> None:
    found = local_run("run.steps=1")
    found.fit()
    assert not (found.folder / "samples").exists()


def test_on_gpus_a_replay_starts_the_roles_that_train_alone(
    run_on_stand_ins: Callable[..., StandInRun],
    stand_ins: StandIns,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On fewer of them too: no engine shares or needs any."""
    roles = (
        "algorithm.advantage=gae",
        "algorithm.loss.kl_coefficient=0.1",
        "reward.model.path=judge",
    )
    found = run_on_stand_ins(
        *RECORDED, *roles, "run.checkpoint_every=1", "rollout.replicas=2"
    )
    stand_ins.begin_anew()
    found.world.ray.actors.clear()
    folder = found.config.run_folder
    given = settings(folder, ("policy.data_parallel=1",))
    config = replay_settings(given, start_before(folder, 2, "never"))
    check_layout(config)
    metrics = replay(config, folder, range(2, 3), Console())
    assert {name.split()[0] for name in found.world.ray.actors} == {
        "policy",
        "reference",
        "critic",
    }
    # Each rank of the stand-ins gives a whole loss, and the record had two.
    assert metrics["policy/loss"] * 2 == found.outcome.steps[1]["policy/loss"]
    assert "step 2/2" in capsys.readouterr().out


# Where a replay begins


def recorded(folder: Path, *steps: int) -> Path:
    for number in steps:
        step_file(folder, number).parent.mkdir(parents=True, exist_ok=True)
        step_file(folder, number).touch()
    return folder


@pytest.mark.parametrize(
    ("checkpoints", "begin", "told"),
    [
        ((1, 2, 3), 2, ""),
        (
            (1,),
            1,
            "there is no checkpoint of step 2: step 2 is trained again first, from the checkpoint of step 1",
        ),
        (
            (),
            0,
            "there is no checkpoint of step 2: steps 1 to 2 are trained again first, from the models that "
            "the run began with",
        ),
    ],
)
def test_a_replay_begins_at_the_last_checkpoint_before_the_step(
    tmp_path: Path, checkpoints: tuple[int, ...], begin: int, told: str
) -> None:
    recorded(tmp_path, 1, 2, 3, 4)
    for number in checkpoints:
        write(checkpoint_path(tmp_path, number), number)
    start = start_before(tmp_path, 3, "auto")
    assert start.checkpoint == (checkpoint_path(tmp_path, begin) if begin else None)
    assert (start.steps, start.describe()) == (range(begin + 1, 4), told)


def test_a_run_that_began_at_another_runs_checkpoint_is_replayed_from_there(
    tmp_path: Path,
) -> None:
    first, run = tmp_path / "first", recorded(tmp_path / "run", 5, 6)
    write(checkpoint_path(first, 4), 4)
    start = start_before(run, 6, str(first))
    assert (start.checkpoint, start.steps) == (checkpoint_path(first, 4), range(5, 7))


@pytest.mark.parametrize(
    ("steps", "step", "resume", "message"),
    [
        ((), 1, "never", r"has no samples of step 1; run.record_samples=true keeps them"),
        ((1, 2), 3, "never", r"has no samples of step 3; it has steps 1 to 2"),
        (
            (2, 3),
            3,
            "never",
            r"has no samples of step 1, and no checkpoint between it and step 3",
        ),
        (
            (1, 2),
            2,
            "elsewhere",
            r"began at run.resume=elsewhere, where there is no checkpoint before step 2",
        ),
    ],
)
def test_what_a_replay_would_need_and_is_not_there_is_said(
    tmp_path: Path, steps: tuple[int, ...], step: int, resume: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        start_before(recorded(tmp_path, *steps), step, resume)


# The command


def test_the_command_refuses_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "is not the folder of a run: it has no config.yaml" in refused(
        str(tmp_path), "--step", "1"
    )
    (tmp_path / "config.yaml").write_text(
        to_yaml(load(None, ["run.name=run", "model.path=model"]))
    )
    assert "has no samples of step 1; run.record_samples=true keeps them" in refused(
        str(tmp_path), "--step", "1"
    )
    assert "policy.rank is not a setting" in refused(
        str(tmp_path), "policy.rank=1", "--step", "1"
    )
    (tmp_path / "config.yaml").write_text("model: {path: model}\nloss: {}\n")
    assert "trained on given sequences" in refused(str(tmp_path), "--step", "1")


def test_the_table_shows_what_was_recorded_beside_what_came_out() -> None:
    recorded = {"policy/loss": 0.5, "policy/grad_norm": None, "rollout/samples": 4.0}
    lines = comparison(
        recorded, {"policy/loss": 0.25, "policy/grad_norm": math.inf, "critic/loss": 2.0}
    )
    assert [line.split() for line in lines] == [
        ["metric", "recorded", "replayed", "difference"],
        ["policy/loss", "0.5", "0.25", "-2.5e-01"],
        ["policy/grad_norm", "nan", "inf", "nan"],
        ["critic/loss", "-", "2", "-"],
    ]
