"""Environments of verifiers as records and as agents, with a model that always says `7`."""

import asyncio
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.refusals import refused
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


class Says7(BaseHTTPRequestHandler):
    keys: list[str] = []  # noqa: RUF012
    seats: set[str] = set()  # noqa: RUF012
    rewards: dict[str, float] = {}  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.keys.append(self.headers["authorization"])
        if self.path.endswith("/reward"):
            self.rewards[body["response_id"]] = body["reward"]
        else:
            self.seats.add(self.headers["x-session-id"])
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "7"},
            "finish_reason": "stop",
        }
        found = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
        }
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, *args: Any) -> None: ...


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
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Says7)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


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


def test_an_episodes_rewards_are_the_sessions(folder: str, url: str) -> None:
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
    assert set(Says7.keys) == {"Bearer secret"}
    with refused("no such answer", EpisodeError):
        asyncio.run(agent(broken, url, "secret"))


def test_seats_that_share_the_policy_have_rewards_of_their_own(
    folder: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Says7, "seats", set())
    monkeypatch.setattr(Says7, "rewards", {})
    harness = "solver.harness.id=pair&judge.harness.id=pair"
    (record, *_) = records("verifiers:pair?select.limit=1")
    with refused("(trainable=False)", EpisodeError):
        asyncio.run(
            Agent(f"verifiers:pair?{harness}&frozen=true", folder)(record, url, "secret")
        )
    Says7.seats.clear()
    played = asyncio.run(
        Agent(f"verifiers:pair?{harness}&bonus=1", folder)(record, url, "secret")
    )
    assert Says7.rewards.keys() == Says7.seats and sorted(Says7.rewards.values()) == [
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
