"""Whole runs whose tasks and rewards come from other packages."""

import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.algorithm.advantages import EPSILON
from controller.config import load
from controller.data.records import read_records
from controller.fit import read_inputs
from tests.end_to_end.test_whole_loop import Run, run_loop
from tests.refusals import refused
from tests.workers.harbor.test_harbor import TASKS, write_task
from tests.workers.openenv.test_openenv import call, play_all
from tests.workers.rollout import agent_model
from tests.workers.sandbox.conftest import needs_bubblewrap
from workers.environment import Turn
from workers.errors import ConfigError
from workers.openenv.server import read_page
from workers.reward_functions import reasoning_gym
from workers.user_code.task_sources import task_records

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
SEATS = (
    SUMS.replace('__all__ = ["SumsHarness", "SumsTaskset"]', "")
    + """
class SeatsConfig(vf.EnvConfig):
    writer: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    reader: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class SeatsEnv(vf.Env[SeatsConfig]):
    async def run(self, task, agents):
        written = await agents.writer.run(task)
        prompt = f"Read: {written.last_reply or 'nothing'}"
        data = task.data.model_copy(update={"prompt": prompt})
        await agents.reader.run(SumTask(data, self.config.taskset.task))

    async def finalize(self, task, episode):
        for trace in episode.traces:
            sign = 1.0 if trace.agent.name == "writer" else -1.0
            trace.record_reward("size", sign * len(trace.last_reply) / 10)


__all__ = ["SeatsEnv", "SumsHarness", "SumsTaskset"]
"""
)
SAMPLES = 3  # of a prompt
SMALL = (
    "run.steps=2",
    "data.max_prompt_tokens=256",
    "policy.max_tokens_per_micro_batch=1024",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agent_model.save(tmp_path_factory.mktemp("agents") / "model")


def of_tasks(settings: list[str], model: Path, name: str, *overrides: str) -> Run:
    return run_loop(
        [*settings, *SMALL, f"run.name={name}", f"model.path={model}", *overrides]
    )


def test_a_run_on_reasoning_gym_is_rewarded_with_its_scores(
    settings: list[str], model: Path
) -> None:
    train, held_out = (
        f"reasoning_gym:chain_sum?size=16&max_terms=2&max_digits=1&seed={seed}"
        for seed in (1, 2)
    )
    data = (
        f"data.train={train}",
        f"data.validation={held_out}",
        "rollout.sampling.max_new_tokens=48",
    )
    run = of_tasks(
        settings,
        model,
        "gym",
        *data,
        "reward.function=workers.reward_functions:reasoning_gym",
    )
    assert len(run.outcome.steps) == 2 and any(
        0 < step["reward/mean"] < 1 for step in run.outcome.steps
    )
    records = read_records(train)
    for line in (run.folder / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        (record,) = (record for record in records if record["question"] in sample["prompt"])
        columns = {name: record[name] for name in ("question", "answer", "metadata")}
        assert reasoning_gym(sample["response"], **columns)["reward"] == pytest.approx(
            sample["reward"]
        )


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
        *(
            "reward.function=",
            "rollout.sampling.max_new_tokens=48",
            "rollout.max_episode_tokens=256",
        ),
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


def test_seats_that_share_the_policy_train_on_rewards_of_their_own(
    settings: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer earns the size of its reply, a reader loses it, and the tokens of both get their advantage."""
    (tmp_path / "seats.py").write_text(SEATS)
    monkeypatch.chdir(tmp_path)
    harness = "writer.harness.id=seats&reader.harness.id=seats"
    run = of_tasks(
        settings,
        model,
        "seats",
        "data.train=verifiers:seats?taskset.last=8",
        "data.validation=",
        "validation.prompts=0",
        "reward.function=",
        f"rollout.environment=verifiers:seats?{harness}",
        "rollout.sampling.max_new_tokens=48",
        "rollout.max_episode_tokens=384",
    )
    assert len(run.outcome.steps) == 2
    for step in run.outcome.steps:
        assert step["policy/rollout_mismatch_max"] < 1e-4 and step["reward/failures"] == 0
        assert step["rollout/rows_per_sample"] == 2 == step["rollout/turns_mean"]
        seats = (step["reward/writer_reward"], step["reward/reader_reward"])
        assert step["reward/mean"] == pytest.approx(sum(seats) / 2)
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for line in (run.folder / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        groups.setdefault((sample["step"], sample["uid"]), []).append(sample)
    whole_groups = [samples for samples in groups.values() if len(samples) == SAMPLES]
    assert {samples[0]["step"] for samples in whole_groups} == {1, 2}
    for samples in whole_groups:
        rewards = [sample["reward"] for sample in samples]
        scale = statistics.stdev(rewards) + EPSILON
        for sample in samples:
            assert {seat_of(node) for node in sample["session"]} == {"writer", "reader"}
            for node in sample["session"]:
                assert node["reward"] == pytest.approx(reward_of_seat(node, sample))
                advantage = (node["reward"] - statistics.fmean(rewards)) / scale
                assert sample["advantages"][node["turn"]] == pytest.approx(advantage)


def seat_of(node: dict[str, Any]) -> str:
    return "reader" if "Read: " in node["messages"][-1]["content"] else "writer"


def reward_of_seat(node: dict[str, Any], sample: dict[str, Any]) -> float:
    """Compute the reward of a reply as `SEATS` does."""
    reply = node["said"].strip()  # as `last_reply`
    right = re.search(r"'answer': (\d+)", sample["record"]).group(1) in reply
    size = len(reply) / 10 if seat_of(node) == "writer" else -len(reply) / 10
    return 0.5 * any(letter.isdigit() for letter in reply) + right + size


@needs_bubblewrap
def test_tasks_in_folders(settings: list[str], model: Path, tmp_path: Path) -> None:
    for name, (dockerfile, tests, solution, _) in TASKS.items():
        write_task(tmp_path / "tasks" / name, dockerfile, tests, solution)
    tasks = f"harbor:{tmp_path / 'tasks'}"
    options = [
        *(
            f"data.train={tasks}",
            "data.validation=",
            "validation.prompts=0",
            "reward.function=",
        ),
        *(
            f"rollout.environment={tasks}",
            "rollout.sandbox.kind=bubblewrap",
            "rollout.sandbox.memory_gib=0.25",
        ),
        *(
            "rollout.sampling.max_new_tokens=24",
            "rollout.max_turns=2",
            "rollout.tool_parser=hermes",
        ),
        *(
            "rollout.max_episode_tokens=256",
            "data.max_prompt_tokens=512",
            "rollout.history=keep",
        ),
    ]
    run = of_tasks(settings, model, "folders", *options)
    assert len(run.outcome.steps) == 2
    for step in run.outcome.steps:
        assert step["reward/failures"] == 0 and step["policy/rollout_mismatch_max"] < 1e-4
        assert 0 <= step["reward/mean"] <= 0.25


COUNTING = '''
from fastmcp import FastMCP
from openenv.core.env_server import Action, MCPEnvironment, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class CountAction(Action):
    by: int


class CountObservation(Observation):
    total: int


class Counting(Environment):
    """Rewards each number. Done above ten."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None):
        self.total = seed % 2
        return CountObservation(total=self.total)

    def step(self, action):
        if action.by == 13:
            raise ValueError("unlucky")
        self.total += action.by
        return CountObservation(total=self.total, reward=float(action.by), done=self.total > 10)

    @property
    def state(self):
        return self._state


class Words(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("words")

        @server.tool
        def measure(word: str) -> dict:
            """Measure a word."""
            return {"letters": len(word)}

        super().__init__(server)
        self._state = State()

    def reset(self, **options):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **options):
        return Observation()

    @property
    def state(self):
        return self._state


counting = create_app(Counting, CountAction, CountObservation, max_concurrent_envs=2)
words = create_app(Words, CallToolAction, CallToolObservation, max_concurrent_envs=2)
'''


@pytest.fixture
def openenv_servers(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """URLs of servers that openenv's own package runs, with its own mcp, in processes of their own."""
    packages = Path(os.environ.get("BALLAST_OPENENV", ".venv/openenv")).absolute()
    if not (packages / "openenv").is_dir():
        pytest.skip("openenv is not installed: see requirements/openenv.txt")
    (tmp_path / "served.py").write_text(COUNTING)
    path = os.pathsep.join(map(str, (packages, tmp_path)))
    ports = [free_port(), free_port()]
    servers = [
        subprocess.Popen(
            [sys.executable, "-m", "uvicorn", f"served:{name}", "--port", str(port)],
            env=os.environ | {"PYTHONPATH": path},
            cwd=tmp_path,
        )
        for name, port in zip(("counting", "words"), ports, strict=True)
    ]
    urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
    try:
        for url in urls:
            wait_until_healthy(url)
        yield urls
    finally:
        for server in servers:
            server.terminate()
            server.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(url: str) -> None:
    for _ in range(600):
        try:
            read_page(url, "/health")
        except ConfigError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(url)


def test_a_server_of_openenv_plays_a_run(
    settings: list[str], model: Path, openenv_servers: tuple[str, str]
) -> None:
    """Only here does OpenEnv's own server answer: elsewhere a stand-in does."""
    counting, words = openenv_servers
    (record,) = task_records(f"openenv:{words}?seeds=1&prompt=Measure")
    turns = [call(record, word="hello"), call(record, by=3), Turn("")]
    ((opening, measured, wrong, end),) = play_all(words, (record, turns))
    assert opening == "" and json.loads(measured.text[0]["content"]) == {"letters": 5}
    assert wrong.text[0]["content"].startswith("Error: ") and end.done
    (record,) = task_records(f"openenv:{counting}?seeds=1")
    good, unlucky = play_all(
        counting, (record, [call(record, by=11)]), (record, [call(record, by=13)])
    )
    assert good[-1].done and good[-1].reward == 11 and "unlucky" in unlucky[-1]
    options = [
        *(
            f"data.train=openenv:{counting}?seeds=8&prompt=Count.",
            "data.validation=",
            "reward.function=",
        ),
        *(
            f"rollout.environment=openenv:{counting}",
            "validation.prompts=0",
            "rollout.history=keep",
        ),
        *(
            "rollout.sampling.max_new_tokens=24",
            "rollout.max_turns=2",
            "rollout.tool_parser=hermes",
        ),
        *("rollout.max_episode_tokens=256", "data.max_prompt_tokens=768"),
    ]
    run = of_tasks(settings, model, "served", *options)
    assert len(run.outcome.steps) == 2
    for step in run.outcome.steps:
        assert step["reward/failures"] == 0 and step["policy/rollout_mismatch_max"] < 1e-4
    assert "count_action" in (run.folder / "samples.jsonl").read_text()
