"""Samples as on GPUs, on stand-ins: engines have GPUs of their own, and a reward model's ranks theirs."""

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from controller.config.sampler import GenerateConfig
from controller.sampling.jobs import Job, JobRequest, checked_settings, read_job
from controller.sampling.models import choose_model
from controller.sampling.output import SamplesFile
from controller.sampling.sampling_run import Attempts, failures_of, sample_missing
from tests.controller.stand_ins.run import StandIns
from tests.end_to_end.faults import Listening
from tests.json_lines import read_lines

SETTINGS = (
    "model.path=model",
    "data.train=prompts.jsonl",
    "data.max_prompt_tokens=8",
    "rollout.samples_per_prompt=2",
    "rollout.sampling.max_new_tokens=8",
    "resources.device=cuda",
    "rollout.replicas=2",
)


def attempt(folder: Path, *overrides: str) -> tuple[Job, Attempts]:
    request = JobRequest(output=folder, settings=(*SETTINGS, *overrides))
    job = read_job(*checked_settings(GenerateConfig, request), prompts=0)
    with closing(SamplesFile(folder, job.identity)) as file:
        return job, sample_missing(job, file, job.keys, Listening())


def generate(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    _, attempts = attempt(folder, *overrides)
    assert attempts.dropped == []
    return read_lines(folder / "samples.jsonl")


def test_engines_alone_sample_every_prompt_and_never_sleep(
    stand_ins: StandIns, tmp_path: Path
) -> None:
    lines = generate(tmp_path, "reward.function=reward.py:reward")
    assert {(line["uid"], line["sample"]) for line in lines} == {
        (str(uid), i) for uid in range(8) for i in range(2)
    }
    assert all(
        len(line["log_probs"]) == len(line["response_ids"]) == line["response_tokens"]
        for line in lines
    )
    assert all("reward" in line for line in lines)
    assert set(stand_ins.world.ray.actors) == {"rollout 0", "rollout 1", "reward 0"}
    assert not {"sleep 2", "receive", "connect"} & set(stand_ins.world.ledger.of("rollout"))


def test_engines_of_a_range_are_added_while_samples_are_made(
    stand_ins: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.engines.elastic_pool.POLL_SECONDS", 0.0)
    stand_ins.free_gpus += [[7], [8], [9]]
    lines = generate(
        tmp_path,
        "reward.function=reward.py:reward",
        "rollout.replicas=1..3",
        "rollout.max_concurrent=1",
    )
    assert len({(line["uid"], line["sample"]) for line in lines}) == len(lines) == 16
    for engine in ("rollout 0", "rollout 1", "rollout 2"):
        assert "generate" in stand_ins.world.ledger.of(engine)
    assert "rollout 3" not in stand_ins.world.ray.actors


def test_a_reward_model_scores_samples_beside_engines(
    stand_ins: StandIns, tmp_path: Path
) -> None:
    lines = generate(
        tmp_path,
        "reward.model.path=judge",
        "reward.model.weight=2.0",
        "policy.max_tokens_per_micro_batch=64",
    )
    assert len(lines) == 16
    assert {line["parts"]["model"] for line in lines} != {0.0}
    # Those of reward workers.
    assert {line["reward"] - 2 * line["parts"]["model"] for line in lines} <= {0.0, 1.0}
    assert stand_ins.world.ledger.of("reward_model")[-2:] == ["scores", "free"]


def test_an_engine_that_is_lost_is_replaced_and_no_sample_is(
    stand_ins: StandIns, tmp_path: Path
) -> None:
    world, left = stand_ins.world, [1]

    def lose(who: str, does: str) -> None:
        if (who, does) == ("rollout 1", "generate") and left:
            left.pop()
            world.ray.actors["rollout 1"].die()

    world.trouble = lose
    assert len(generate(tmp_path)) == 16 and not left


def test_samples_that_are_retried_or_given_up_have_a_line_by_kind_with_count_place_and_cause(
    stand_ins: StandIns, tmp_path: Path
) -> None:
    def refuse(who: str, does: str) -> None:
        if does == "generate":
            raise ValueError("no memory")

    stand_ins.world.trouble = refuse
    job, attempts = attempt(tmp_path, "rollout.max_retries=1")
    given_up, retried = failures_of(job, attempts, [{"uid": "3", "sample": 1}])
    assert (given_up.kind, given_up.count) == (
        "samples given up (rollout.max_retries=1)",
        16,
    )
    assert (retried.kind, retried.count) == ("samples retried", 16)
    for failures in (given_up, retried):
        assert re.fullmatch(
            r"prompt \d, sample \d, rollout replica \d: .*no memory.*", failures.first
        )
    (of_rewards,) = failures_of(
        job, Attempts(), [{"uid": "3", "sample": 1, "failure": "took 3 s"}] * 2
    )
    assert (
        str(of_rewards)
        == "rewards failed (reward.on_failure=zero): 2, the first: prompt 3, sample 1: took 3 s"
    )


def test_a_checkpoint_is_written_as_a_model_by_the_policys_ranks_alone(
    stand_ins: StandIns, tmp_path: Path
) -> None:
    run = stand_ins.run(
        [
            f"run.dir={tmp_path}",
            "data.validation=''",
            "run.steps=1",
            "run.checkpoint_every=1",
        ]
    )
    stand_ins.begin_anew()
    stand_ins.world.ray.actors.clear()
    model = choose_model(str(run.config.run_folder / "checkpoints" / "policy" / "step-1"))
    config, *_ = checked_settings(
        GenerateConfig, JobRequest(output=tmp_path / "samples", settings=SETTINGS)
    )
    model.write(config, Listening())
    assert set(stand_ins.world.ray.actors) == {"policy dp=0"}
    assert stand_ins.world.ledger.of("policy")[-2:] == ["save", "free"]
    assert Path(model.path).name == "model-1" and Path(model.path).is_dir()
