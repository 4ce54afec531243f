"""Whole runs whose tasks and rewards come from other packages."""

import json
from pathlib import Path

import pytest

from controller.config import load
from controller.data.records import read_records
from controller.fit import read_inputs
from tests.end_to_end.test_whole_loop import Run, run_loop
from tests.refusals import refused
from tests.workers.harbor.test_harbor import TASKS, write_task
from tests.workers.rollout import agent_model
from tests.workers.sandbox.conftest import needs_bubblewrap
from workers.reward_functions import reasoning_gym

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]
SUMS = """
import openai
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.5)
    async def says_a_number(self, trace: vf.Trace) -> float:
        return float(any(letter.isdigit() for letter in trace.last_reply))

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in trace.last_reply)

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class SumsConfig(vf.TasksetConfig):
    last: int = 9


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> list[SumTask]:
        ask = "What is {} + 1?".format
        data = [SumData(prompt=ask(n), system_prompt="Add.", answer=n + 1) for n in range(self.config.last)]
        return [SumTask(each, self.config.task) for each in data]


class SumsHarnessConfig(vf.HarnessConfig):
    turns: int = 1


class SumsHarness(vf.Harness[SumsHarnessConfig]):
    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        for _ in range(self.config.turns):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SumsHarness", "SumsTaskset"]
"""
SMALL = ("run.steps=2", "data.max_prompt_tokens=256", "policy.max_tokens_per_micro_batch=1024")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agent_model.save(tmp_path_factory.mktemp("agents") / "model")


def of_tasks(settings: list[str], model: Path, name: str, *overrides: str) -> Run:
    return run_loop([*settings, *SMALL, f"run.name={name}", f"model.path={model}", *overrides])


def test_a_run_on_reasoning_gym_is_rewarded_with_its_scores(settings: list[str], model: Path) -> None:
    train, held_out = (
        f"reasoning_gym:chain_sum?size=16&max_terms=2&max_digits=1&seed={seed}" for seed in (1, 2)
    )
    data = (f"data.train={train}", f"data.validation={held_out}", "rollout.sampling.max_new_tokens=48")
    run = of_tasks(settings, model, "gym", *data, "reward.function=workers.reward_functions:reasoning_gym")
    assert len(run.outcome.steps) == 2 and any(0 < step["reward/mean"] < 1 for step in run.outcome.steps)
    records = read_records(train)
    for line in (run.folder / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        (record,) = (record for record in records if record["question"] in sample["prompt"])
        columns = {name: record[name] for name in ("question", "answer", "metadata")}
        assert reasoning_gym(sample["response"], **columns)["reward"] == pytest.approx(sample["reward"])


def test_an_environment_of_verifiers_plays_a_run(
    settings: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task set is the data, its harness asks the policy twice, and its rewards are the sessions'."""
    (tmp_path / "sums.py").write_text(SUMS)
    monkeypatch.chdir(tmp_path)
    environment = "verifiers:sums?agent.runtime.type=subprocess&agent.harness.id=sums&agent.harness.turns=2"
    given = [
        *(
            "data.train=verifiers:sums?taskset.last=9&select.skip=3",
            "data.validation=",
            "validation.prompts=0",
        ),
        *("reward.function=", "rollout.sampling.max_new_tokens=48", "rollout.max_episode_tokens=256"),
    ]
    run = of_tasks(settings, model, "sums", *given, f"rollout.environment={environment}")
    for step in run.outcome.steps:
        assert step["policy/rollout_mismatch_max"] < 1e-4 and step["reward/failures"] == 0
        assert step["rollout/turns_mean"] == 2 == step["reward/replies"]
        parts = 0.5 * step["reward/says_a_number"] + step["reward/correct"]
        assert step["reward/mean"] == pytest.approx(parts) and parts > 0
    assert {len(score.session) for score in run.rollout.by_sample.values()} == {2}
    for line in (run.folder / "samples.jsonl").read_text().splitlines():
        assert "Add." in json.loads(line)["prompt"]
    broken = f"rollout.environment={environment.replace('turns=2', 'turns=many')}"
    with refused(broken):
        read_inputs(load(None, [*settings, *SMALL, *given, f"model.path={model}", broken]))


@needs_bubblewrap
def test_tasks_in_folders_play_a_run_in_sandboxes(settings: list[str], model: Path, tmp_path: Path) -> None:
    for name, (dockerfile, tests, solution, _) in TASKS.items():
        write_task(tmp_path / "tasks" / name, dockerfile, tests, solution)
    tasks = f"harbor:{tmp_path / 'tasks'}"
    options = [
        *(f"data.train={tasks}", "data.validation=", "validation.prompts=0", "reward.function="),
        *(
            f"rollout.environment={tasks}",
            "rollout.sandbox.kind=bubblewrap",
            "rollout.sandbox.memory_gib=0.25",
        ),
        *("rollout.sampling.max_new_tokens=24", "rollout.max_turns=2", "rollout.tool_parser=hermes"),
        *("rollout.max_episode_tokens=256", "data.max_prompt_tokens=512", "rollout.history=keep"),
    ]
    run = of_tasks(settings, model, "folders", *options)
    assert len(run.outcome.steps) == 2
    for step in run.outcome.steps:
        assert step["reward/failures"] == 0 and step["policy/rollout_mismatch_max"] < 1e-4
        assert 0 <= step["reward/mean"] <= 0.25
