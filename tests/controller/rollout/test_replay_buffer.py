"""Replay of good samples from a configuration: what a step trains on, with which numbers, and how a run goes
on.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from controller.algorithm.advantages import sequence_advantages
from controller.config import load
from controller.preflight.checks import check
from tests.controller.observability.recorded_sessions import FORKED
from tests.controller.stand_ins.roles import TOKENS, LocalRun
from tests.controller.stand_ins.run import StandInRun, StandIns, write_stand_in_workspace
from tests.refusals import refused, refused_rows
from tests.workers.model.tiny import unpacked_log_probs
from workers.batch.remote_batch import RemoteBatch
from workers.batch.score import Score
from workers.errors import DataError

REPLAY = ("batch.replay.share=0.5", "batch.replay.keep=2")
LEVELS = (
    "algorithm.loss.name=custom",
    "algorithm.loss.function=losses.py:loss",
    "algorithm.loss.columns=level",
)
COMPUTED = (
    "run.steps=4",
    "run.checkpoint_every=1",
    "policy.optimizer.learning_rate=1e-2",
    *REPLAY,
)


def keys(batch: RemoteBatch) -> list[tuple[str, int]]:
    return list(zip(batch["uid"].tolist(), batch["sample"].tolist(), strict=True))


@pytest.mark.parametrize("more", [(), ("rollout.max_staleness=1",), LEVELS])
def test_a_step_trains_again_on_good_samples_of_the_last_versions(
    local_run: Callable[..., LocalRun], more: tuple[str, ...]
) -> None:
    found = local_run("run.steps=6", *REPLAY, *more)
    # Every third teaches nothing.
    found.rewards.reward = lambda uid, sample, greedy: float(sample * (int(uid) % 3 > 0))
    outcome = found.fit()
    first: dict[tuple[str, int], tuple[float, str]] = {}
    batches = {batch.meta["step"]: batch for batch, _ in found.policy.updates}
    replayed = 0
    for step, batch in batches.items():
        row = outcome.steps[step - 1]
        assert len(set(keys(batch))) == len(batch)
        places = batch.tokens["input_ids"].tolist()
        ages = []
        for index, key in enumerate(keys(batch)):
            told = float(batch["advantages"][index]), places[index]
            if index < 4:
                assert key not in first and np.isnan(batch["kept_advantages"][index])
                first[key] = told
            else:
                assert first[key] == told and told[0] > 0
                ages.append(step - 1 - int(batch["weight_version"][index]))
        replayed += len(ages)
        groups = set(
            zip(batch["uid"].tolist(), batch["group_number"].tolist(), strict=True)
        )
        assert len(groups) == len(set(batch["uid"].tolist()))
        assert row["replay/share"] == len(ages) / len(batch)
        assert len(ages) <= 2 and max(ages, default=0) <= 2
        assert row.get("replay/age_mean", 0.0) == (np.mean(ages) if ages else 0.0)
        assert (
            batch.tokens["old_log_probs"].tolist()
            == batch.tokens["rollout_log_probs"].tolist()
        )
    assert replayed > 6


def test_a_step_whose_new_samples_teach_nothing_trains_on_replayed_ones(
    local_run: Callable[..., LocalRun],
) -> None:
    found = local_run("run.steps=2", *REPLAY, "algorithm.zero_variance_groups=drop")
    found.rewards.reward = lambda uid, sample, greedy: float(sample if int(uid) < 2 else 1)
    found.fit()
    assert [len(batch) for batch, _ in found.policy.updates] == [4, 2]
    assert keys(found.policy.updates[1][0]) == [("0", 1), ("1", 1)]


def test_an_agents_rewards_of_single_responses_are_refused(
    local_run: Callable[..., LocalRun],
) -> None:
    found = local_run("run.steps=1", *REPLAY)
    found.policy.turn_advantages = lambda *given: found.policy._pass(
        ("turn_advantages"), *given, "advantages"
    )  # type: ignore[attr-defined]
    found.rewards.reward = lambda uid, sample, greedy: Score(
        float(sample), "", session=tuple(FORKED), credit=((TOKENS, 1.0, 0),)
    )
    with refused("batch.replay.share=0.5", DataError):
        found.fit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replaying")
    write_stand_in_workspace(path)
    return path


@pytest.fixture
def run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., StandInRun]:
    monkeypatch.chdir(folder)
    stand_ins = StandIns(monkeypatch)
    stand_ins.compute("float64")
    settings = [
        f"run.dir={tmp_path}",
        "policy.data_parallel=1",
        "data.validation=''",
        "rollout.placement=colocated",
    ]
    return lambda *overrides: stand_ins.run([*settings, *COMPUTED, *overrides])


def test_the_loss_takes_replayed_samples_ratios_to_their_samplers(
    run: Callable[..., StandInRun], batches: list[RemoteBatch]
) -> None:
    finished = run(
        "run.steps=2", "run.checkpoint_every=0", "policy.optimizer.learning_rate=1e-12"
    )
    batch, rows = batches[1], batches[1].gather()
    assert len(batch) == 6
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float64)
    new = sequence_advantages(
        finished.config.algorithm, batch.select(range(4)), batch["reward"][:4]
    )
    advantages = [*new.tolist(), *batch["kept_advantages"][4:].tolist()]
    losses = []
    for index, (log_probs, _) in enumerate(unpacked_log_probs(model, rows)):
        row = rows.row(index)
        mask = row["loss_mask"]
        ratio = (
            log_probs.detach()[mask[-len(log_probs) :]] - row["rollout_log_probs"][mask]
        ).exp()
        losses.append(
            -torch.minimum(
                ratio * advantages[index], ratio.clamp(0.8, 1.2) * advantages[index]
            )
        )
    assert finished.outcome.steps[1]["policy/loss"] == pytest.approx(
        torch.cat(losses).mean().item(), rel=1e-6
    )


def test_a_killed_run_draws_and_learns_as_if_never_stopped(
    run: Callable[..., StandInRun], batches: list[RemoteBatch]
) -> None:
    straight = run("run.name=straight").outcome.steps
    drawn = [keys(batch) for batch in batches]
    batches.clear()
    run("run.steps=2")
    resumed = run("run.resume=auto")
    assert [keys(batch) for batch in batches] == drawn
    assert len(drawn[-1]) == 6
    for now, before in zip(resumed.outcome.steps, straight[2:], strict=True):
        names = [
            name for name in before if name.startswith(("policy/", "replay/", "reward/"))
        ]
        assert {name: now[name] for name in names} == {name: before[name] for name in names}


@refused_rows("""
batch.replay.keep=3
batch.replay.share=0.5 algorithm.advantage=gae
algorithm.loss.name=reinforce batch.replay.share=0.5
rollout.sampling.top_k=5 rollout.sampling.temperature=0.5 batch.replay.share=0.5
""")
def test_what_cannot_be_corrected_is_refused(
    workspace: Path, named: str, overrides: list[str]
) -> None:
    with refused(named):
        check(load("config.yaml", overrides))
