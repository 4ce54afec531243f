"""Parts of a user's own: those of docs/your-own.md, from a configuration to what a run does, and what is
refused.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ballast.replay.__main__ import replay, replay_settings, settings, start_before
from controller import step
from controller.checkpoints.progress import checkpoints_at
from controller.config import Config
from controller.fit import Inputs, read_inputs
from controller.observability.console import Console
from controller.run import Run
from tests.controller.bad_inputs import BadInput, check_refused, rows
from tests.controller.stand_ins.gpus import StandInReward
from tests.controller.stand_ins.run import StandInRun, StandIns
from tests.documentation.blocks import ROOT, blocks_of
from tests.documentation.workspace import own_parts
from tests.json_lines import read_lines
from workers.batch.remote_batch import RemoteBatch
from workers.batch.score import Score
from workers.errors import LostError
from workers.model.checkpoint.checkpoint_folder import read_manifest

OwnRun = Callable[..., StandInRun]
PARTS = own_parts()
REWARD = """
def reward(response):
    return {"reward": 0.0, "exact_match": 0.0, "brief": 0.0}


def by_level(response, level):
    return 0.0
"""
FUNCTIONS: dict[str, Any] = {}
exec(PARTS, FUNCTIONS)


def scored(actor: StandInReward, block: Any, requests: Sequence[Any]) -> list[Score]:
    """Score rows 0 and 1 with 1, and others with 0 and 1 in turn, or by level where the reward takes it."""
    found = []
    for request in requests:
        right = float(
            request.columns.get(
                "level", max(1, request.row) if request.row < 2 else request.row
            )
            % 2
        )
        found.append(
            Score(
                right,
                "text",
                {"exact_match": right, "brief": 1.0 - right / (2 + request.row)},
            )
        )
    return found


@pytest.fixture
def own_run(stand_ins: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnRun:
    """A run with the page's functions in `parts.py`."""
    monkeypatch.setattr(StandInReward, "score", scored)
    (tmp_path / "own.py").write_text(REWARD)
    (tmp_path / "parts.py").write_text(
        PARTS + "\n\ndef halved(reward):\n    return reward / 2\n"
    )
    more = [f"run.dir={tmp_path}", "data.validation=''", "reward.function=own.py:reward"]

    known: list[Inputs] = []

    def read(config: Config) -> Inputs:
        known[:] = known or [read_inputs(config)]
        return known[0]

    def run(*overrides: str, losses: str = "") -> StandInRun:
        (tmp_path / "losses.py").write_text(losses)
        return stand_ins.run(
            [
                re.sub(r"(own|parts|losses)\.py", rf"{tmp_path}/\1.py", each)
                for each in (*more, *overrides)
            ],
            read,
        )

    return run


def samples(run: StandInRun) -> list[dict[str, Any]]:
    return read_lines(run.config.run_folder / "samples.jsonl")


def test_the_functions_of_samples_of_the_documentation(
    own_run: OwnRun, stand_ins: StandIns
) -> None:
    """Advantages, shaping, filter, metrics and a curriculum in one run. A replay computes the same
    advantages.
    """
    found = own_run(
        "algorithm.advantage=custom",
        "algorithm.advantage_function=parts.py:each_part",
        "algorithm.zero_variance_groups=drop",
        "algorithm.group_filter=parts.py:neither_easy_nor_hard",
        "reward.shaping=parts.py:prefer_short",
        "run.metrics=parts.py:by_source",
        "data.curriculum=parts.py:easy_first",
        "run.record_samples=true",
        "batch.prompts_per_step=3",
        "batch.replay.share=0.5",
        "batch.replay.by=parts.py:rare_successes",
    )
    last = found.outcome.steps[-1]
    assert [last[name] for name in ("reward/shaping", "rollout/samples_left_out")] == [
        0.0,
        2.0,
    ]
    assert last["replay/share"] > 0
    told = {
        (int(row["uid"]), row["sample"]): row for row in samples(found) if row["step"] == 2
    }
    assert told[3, 0]["advantage"] is None and set(told) >= {(4, 0), (4, 1)}
    assert [last[f"mine/reward/table {number}"] for number in (4, 5, 6)] == [1.0, 0.5, 0.5]
    trained = {
        "exact_match": [0.0, 1.0, 0.0, 1.0],
        "brief": [1.0, 1 - 1 / 5, 1.0, 1 - 1 / 7],
    }
    columns = {name: np.array(column) for name, column in trained.items()}
    expected = FUNCTIONS["each_part"](group=np.array([0, 0, 1, 1]), **columns)
    assert [told[4, sample]["advantage"] for sample in (0, 1)] == pytest.approx(
        expected[:2].tolist()
    )
    stand_ins.begin_anew()
    folder = found.config.run_folder
    again = replay(
        replay_settings(settings(folder, trust_run=True), start_before(folder, 2, "never")),
        folder,
        range(1, 3),
        Console(),
    )
    assert again["policy/loss"] == last["policy/loss"]


@pytest.mark.parametrize(
    "more",
    [(), ("rollout.max_staleness=1", "rollout.placement=apart")],
    ids=["sync", "ahead"],
)
def test_a_sampler_sees_rewards_and_goes_on_from_a_checkpoint(
    own_run: OwnRun, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """A run that loses its workers in step 3 asks for the prompts of one that does not."""
    own = (
        "data.sampler=parts.py:uncertain",
        "run.checkpoint_every=1",
        "reward.function=own.py:by_level",
        *more,
    )
    whole, learn, lost = (
        own_run(*own, "run.steps=4", "run.name=whole"),
        step.learn,
        list[int](),
    )

    def lose(run: Run, batch: RemoteBatch) -> None:
        if run.number == 3 and not lost:
            lost.append(run.number)
            raise LostError("a worker is gone")
        learn(run, batch)

    monkeypatch.setattr(step, "learn", lose)
    resumed = own_run(*own, "run.steps=4")
    assert lost
    first, second = (
        [(row["step"], row["uid"], row["prompt"]) for row in samples(run)]
        for run in (whole, resumed)
    )
    assert first == second
    states = [
        read_manifest(checkpoints_at(run.config.run_folder)[0]).extra["sampler"]
        for run in (whole, resumed)
    ]
    assert states[0] == states[1] and len(set(states[0]["state"]["p"])) > 1


def test_the_auxiliary_loss_of_the_documentation_reads_hidden_states(
    own_run: OwnRun, stand_ins: StandIns
) -> None:
    """By the real engine: the term alone, with rewards that give no advantage, makes the states smaller."""
    (loss,) = (
        each.body
        for each in blocks_of(ROOT / "docs" / "your-own.md")
        if "def small_states(" in each.body
    )
    stand_ins.compute()
    own = (
        "algorithm.loss.name=custom",
        "algorithm.loss.function=losses.py:small_states",
        "policy.data_parallel=1",
    )
    more = (
        "run.steps=3",
        "policy.optimizer.learning_rate=1e-3",
        "reward.function=own.py:by_level",
    )
    found = own_run(
        *own, *more, "algorithm.loss.hidden_states=true", losses=loss.replace("0.01", "1.0")
    )
    sizes = [step["policy/hidden_size"] for step in found.outcome.steps]
    assert sizes[0] > sizes[1] > sizes[2] > 0


def made(
    what: str, setting: str, body: str, *words: str, more: Sequence[str] = ()
) -> BadInput:
    """A function of samples or a sampler, of which `body` is what it does."""
    name, _, taken = setting.partition(" ")
    text = f"import time\n\n\ndef mine({taken or 'reward'}):\n    {body}\n"

    def write(folder: Path) -> None:
        (folder / "mine.py").write_text(text)

    return BadInput(
        f"{name} that {what}", [name, *words], [f"{name}=mine.py:mine", *more], write
    )


NO_SPREAD = "return [1.0 if sum(reward) else float('nan')] * len(reward)"
CUSTOM, DROPS = ["algorithm.advantage=custom"], ["algorithm.zero_variance_groups=drop"]


@pytest.mark.drawn(5)
@rows(
    made("is too short", "reward.shaping", "return reward[:1]", "it returned [1.0]"),
    made(
        "needs a spread",
        "algorithm.advantage_function",
        NO_SPREAD,
        "it returned [nan",
        more=CUSTOM,
    ),
    made(
        "takes what is not there",
        "algorithm.advantage_function reward, level",
        "...",
        "'level'",
        more=CUSTOM,
    ),
    made(
        "says maybe",
        "algorithm.group_filter",
        "return 'yes'",
        "it returned 'yes'",
        more=DROPS,
    ),
    made("returns a list", "run.metrics", "return [1.0]", "it returned [1.0]"),
    made(
        "weighs by texts",
        "batch.replay.by",
        "return ['a'] * 4",
        "it returned ['a'",
        more=["batch.replay.share=1"],
    ),
    made("raises", "run.metrics", "raise ValueError('no')", "ValueError: no"),
    made("returns no state", "data.sampler count", "return [0] * count", "and a state"),
    made(
        "names no record",
        "data.sampler count",
        "return [9] * count, {}",
        "record 9 of 1 records",
    ),
    made(
        "keeps an object",
        "data.sampler count",
        "return [0] * count, {'at': time.gmtime}",
        "function gmtime",
    ),
    made("takes what is not there", "data.sampler epoch", "...", "'epoch'"),
    made(
        "mixes",
        "data.sampler count",
        "...",
        "data.sources",
        more=["data.train=''", "data.sources={train.jsonl: 1}"],
    ),
    BadInput(
        "a custom advantage without a function", ["algorithm.advantage=custom"], CUSTOM
    ),
    BadInput(
        "a function without its advantage",
        ["algorithm.advantage_function"],
        ["algorithm.advantage_function=a:b"],
    ),
    BadInput(
        "a filter of groups that are kept",
        ["algorithm.group_filter"],
        ["algorithm.group_filter=a:b"],
    ),
)
def test_parts_that_fail_when_they_are_tried_are_refused(
    case: BadInput,
    workspace: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_refused(case, workspace, capfd, monkeypatch, "--dry-run")
