"""Whole runs whose tasks and rewards come from other packages."""

import json
from pathlib import Path

import pytest

from controller.data.records import read_records
from tests.end_to_end.test_whole_loop import Run, run_loop
from tests.workers.rollout import agent_model
from workers.reward_functions import reasoning_gym

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]
SMALL = ("run.steps=2", "data.max_prompt_tokens=256", "policy.max_tokens_per_micro_batch=1024")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agent_model.save(tmp_path_factory.mktemp("agents") / "model")


def of_tasks(settings: list[str], model: Path, name: str, *overrides: str) -> Run:
    return run_loop([*settings, *SMALL, f"run.name={name}", f"model.path={model}", *overrides])


def test_a_run_on_reasoning_gym_is_rewarded_with_its_scores(settings: list[str], model: Path) -> None:
    train, held_out = (f"reasoning_gym:chain_sum?size=16&max_terms=2&max_digits=1&seed={seed}" for seed in (1, 2))
    data = (f"data.train={train}", f"data.validation={held_out}", "rollout.sampling.max_new_tokens=48")
    run = of_tasks(settings, model, "gym", *data, "reward.function=workers.reward_functions:reasoning_gym")
    assert len(run.outcome.steps) == 2 and any(0 < step["reward/mean"] < 1 for step in run.outcome.steps)
    records = read_records(train)
    for line in (run.folder / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        (record,) = (record for record in records if record["question"] in sample["prompt"])
        columns = {name: record[name] for name in ("question", "answer", "metadata")}
        assert reasoning_gym(sample["response"], **columns)["reward"] == pytest.approx(sample["reward"])
