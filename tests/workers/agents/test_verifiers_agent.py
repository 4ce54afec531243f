"""Environments of verifiers as records and as agents, with a model that always says `7`."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refused
from tests.workers.agents.chat_server import ChatRequest, serve_chats
from workers.agents.verifiers_agent import Agent, records
from workers.errors import EpisodeError

MODULE = """
import itertools

import openai
import verifiers.v1 as vf


class EndlessData(vf.TaskData):
    wanted: str


class EndlessTask(vf.Task[EndlessData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.wanted == "broken":
            raise ValueError("no such answer\\nat all")
        return float(trace.last_reply == self.data.wanted)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class EndlessTaskset(vf.Taskset[EndlessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        prompts = ["Say 7.", [vf.UserMessage(content="Say 7."), vf.UserMessage(content="Now.")], None, "x"]
        for number in itertools.count():
            wanted = ("7", "8", "7", "broken")[number % 4]
            data = EndlessData(prompt=prompts[number % 4], name=f"task {number}", system_prompt="Count.", wanted=wanted)
            yield EndlessTask(data, self.config.task)


class EndlessHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        await client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": str(data.prompt)}])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    judge: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    frozen: bool = False
    bonus: float = 0.0


class PairEnv(vf.Env[PairConfig]):
    async def setup(self, agents):
        agents.judge.trainable = not self.config.frozen

    async def run(self, task, agents):
        await agents.solver.run(task)
        await agents.judge.run(task)

    async def finalize(self, task, episode):
        for trace in episode.traces:
            if trace.agent.name == "judge" and self.config.bonus:
                trace.record_reward("bonus", self.config.bonus)


__all__ = ["EndlessHarness", "EndlessTaskset", "PairEnv"]
"""
ONE = "agent.runtime.type=subprocess"


class Says7:
    """The policy, which hears rewards too. rewards: by seat."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.seats: set[str] = set()
        self.rewards: dict[str, float] = {}

    def answer(self, request: ChatRequest) -> dict[str, Any]:
        self.keys.add(request.headers["authorization"])
        if request.path.endswith("/reward"):
            self.rewards[request.body["response_id"]] = request.body["reward"]
        else:
            self.seats.add(request.headers["x-session-id"])
        return {"role": "assistant", "content": "7"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The working directory, with the environments `endless`, of one agent, and `pair`, of two."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    (tmp_path / "endless.py").write_text(MODULE.replace(', "PairEnv"', ""))
    (tmp_path / "pair.py").write_text(MODULE)
    yield str(tmp_path)
    sys.modules.pop("endless", None)
    sys.modules.pop("pair", None)


@pytest.fixture
def policy() -> Says7:
    return Says7()


@pytest.fixture
def url(policy: Says7) -> Iterator[str]:
    with serve_chats(policy.answer) as url:
        yield url


def test_tasks_are_records_of_chat_messages(folder: str) -> None:
    text, messages, opened = records(f"verifiers:endless?{ONE}&select.limit=3")
    system = {"role": "system", "content": "Count."}
    assert text["prompt"] == [system, {"role": "user", "content": "Say 7."}]
    assert [message["content"] for message in messages["prompt"]] == [
        "Count.",
        "Say 7.",
        "Now.",
    ]
    assert opened["prompt"][-1] == {"role": "user", "content": "task 2"}
    assert json.loads(json.dumps(text))["task"]["wanted"] == "7"
    for wrong in ("", "?select.limit=many", "?taskset.size=3"):
        with refused(""):
            records(f"verifiers:endless{wrong}")


def test_an_episodes_rewards_are_the_sessions(folder: str, policy: Says7, url: str) -> None:
    right, wrong, _, broken = records(f"verifiers:endless?{ONE}&select.limit=4")
    agent = Agent(f"verifiers:endless?{ONE}", folder)
    assert asyncio.run(agent(right, url, "secret")) == {
        "reward": 2.0,
        "right": 1.0,
        "length": 1.0,
    }
    assert asyncio.run(agent(wrong, url, "secret")) == {
        "reward": 0.0,
        "right": 0.0,
        "length": 1.0,
    }
    assert policy.keys == {"Bearer secret"}
    with refused("no such answer", EpisodeError):
        asyncio.run(agent(broken, url, "secret"))


def test_seats_that_share_the_policy_have_rewards_of_their_own(
    folder: str, policy: Says7, url: str
) -> None:
    harness = "solver.harness.id=pair&judge.harness.id=pair"
    (record, *_) = records("verifiers:pair?select.limit=1")
    with refused("(trainable=False)", EpisodeError):
        asyncio.run(
            Agent(f"verifiers:pair?{harness}&frozen=true", folder)(record, url, "secret")
        )
    policy.seats.clear()
    played = asyncio.run(
        Agent(f"verifiers:pair?{harness}&bonus=1", folder)(record, url, "secret")
    )
    assert policy.rewards.keys() == policy.seats and sorted(policy.rewards.values()) == [
        2.0,
        3.0,
    ]
    assert (played["reward"], played["solver_reward"], played["judge_reward"]) == (
        2.5,
        2.0,
        3.0,
    )
    assert (played["judge_right"], played["judge_bonus"]) == (1.0, 1.0)


def test_a_seat_with_a_model_of_its_own_is_not_rewarded(folder: str, url: str) -> None:
    harness = "solver.harness.id=pair&judge.harness.id=pair"
    (record, *_) = records("verifiers:pair?select.limit=1")
    other = f"judge.client.type=eval&judge.client.base_url={url}/../v1&judge.model=m"
    played = asyncio.run(
        Agent(f"verifiers:pair?{harness}&{other}", folder)(record, url, "secret")
    )
    assert played == {"reward": 2.0, "right": 1.0, "length": 1.0}
