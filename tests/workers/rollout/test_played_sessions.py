"""What becomes of a session that its agent has left: reward, failure, finish reason and rows."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from workers.agents.front import Takeover
from workers.agents.gateway import Access, Gateway
from workers.agents.session import Session
from workers.batch.score import Score
from workers.config.roles import ModelConfig, RolloutConfig, SamplingConfig
from workers.engine.requests import EpisodeStart, Response, SampleRequest
from workers.errors import EpisodeError
from workers.rollout import players
from workers.rollout.players import AgentPlayer
from workers.rollout.results import Sample, finish_session

REQUEST = SampleRequest("uid", 1, np.arange(3, dtype=np.int32), seed=5)
PARTS = Score(0.5, "", {"tries": 2.0}, answer="8")


def session_of(finish_reasons: Sequence[str] = ("stop", "stop")) -> Session:
    """Roots with answers `r0`, `r1`, ... of two tokens each."""
    session = Session("name", max_turns=len(finish_reasons))
    for number, reason in enumerate(finish_reasons):
        response = Response(
            np.array([7, number]), np.array([-1.0, -2.0]), np.array([4, 4]), reason
        )
        with session.sampling() as turn:
            asked = session.find([{"role": "user", "content": f"{number}?"}])
            said = {"role": "assistant", "content": str(number)}
            prompt = np.array([1, 2, number], np.int32)
            node = session.add(
                asked, prompt, response, number=turn, message=said, name=f"r{number}"
            )
            node.received = True
    return session


def play(
    session: Session, given: Score | None, failure: str = "", *, needs_reward: bool = True
) -> Sample:
    return finish_session(REQUEST, session, given, failure, needs_reward=needs_reward)


@pytest.mark.parametrize(
    ("given", "rewards", "needs_reward", "reward", "offsets"),
    [
        (PARTS, {}, True, 0.5, [0, 0]),
        (None, {"": 0.25}, True, 0.25, [0, 0]),
        (PARTS, {"": 0.25}, True, 0.5, [0, 0]),
        (None, {"r0": 1.0, "r1": 0.0}, True, 0.5, [0.5, -0.5]),
        (PARTS, {"r0": 1.5}, True, 1.0, [0.5, -0.5]),
        (None, {}, False, 0.0, [0, 0]),
        # Reward functions add theirs to both leaves.
        (None, {"r0": 1.0}, False, 0.5, [0.5, -0.5]),
        (PARTS, {}, False, 0.5, [0, 0]),
        (None, {}, True, None, [0, 0]),
        (None, {"r0": 1.0}, True, None, None),
    ],
)
def test_the_reward_is_the_mean_over_leaves_and_missing_where_nothing_gives_it(
    given: Score | None,
    rewards: dict[str, float],
    needs_reward: bool,
    reward: float | None,
    offsets: list[float] | None,
) -> None:
    session = session_of()
    for name, value in rewards.items():
        session.reward(value, name)
    result, rows = play(session, given, needs_reward=needs_reward)
    score = result.environment
    assert score is not None and score.reward == (reward or 0.0)
    assert bool(score.failure) == (reward is None) and (
        not score.failure or score.failure.startswith("agent: ")
    )
    assert offsets is None or [offset for _, offset, _ in score.credit] == offsets
    named = {"agent": 0.5} if given and not needs_reward else {}
    assert (score.parts, score.answer) == (
        (given.parts | named, given.answer) if given else ({}, "")
    )
    assert len(rows) == 3 and len(result.branches) == 2 and len(score.session) == 2
    assert result.messages[-1] == {"role": "assistant", "content": "1"}


def test_a_failure_keeps_the_turns_and_no_reward() -> None:
    session = session_of()
    session.reward(3.0)
    result, rows = play(session, None, "it raised ValueError")
    assert result.environment is not None
    assert (result.environment.reward, result.environment.failure) == (
        0.0,
        "agent: it raised ValueError",
    )
    assert sum(int(row["loss_mask"].sum()) for row in rows[1:]) == 4


def test_a_limit_on_tokens_or_turns_is_the_finish_reason() -> None:
    # The agent went on.
    assert play(session_of(["length", "stop"]), PARTS)[0].finish_reason == "stop"
    assert play(session_of(["stop", "length"]), PARTS)[0].finish_reason == "length"
    session = session_of()
    with pytest.raises(EpisodeError), session.sampling():
        pass
    assert play(session, PARTS)[0].finish_reason == "turns"


class Dying:
    """An engine whose death is known when it is asked, gateway and agents of its player."""

    errored = False

    async def get_weight_version(self) -> str:
        from vllm.v1.engine.exceptions import EngineDeadError

        self.errored = True
        raise EngineDeadError

    def open(self, session: Session, *_: Any, **__: Any) -> Access:
        session.nodes = session_of().nodes
        return Access("", "", "")

    async def close(self, session: Session) -> None:
        pass

    async def run(self, *_: Any) -> Score:
        raise EpisodeError("ended its process")


def test_an_agent_that_dies_with_its_engine_has_not_failed() -> None:
    """The engine's request then goes to another one, with the session's record."""
    from vllm.v1.engine.exceptions import EngineDeadError

    dying: Any = Dying()
    player = AgentPlayer(dying, RolloutConfig(), dying, dying, None, needs_reward=False)
    request = SampleRequest(
        "uid", 1, np.arange(3, dtype=np.int32), seed=5, start=EpisodeStart({}, "")
    )
    with pytest.raises(EngineDeadError):
        asyncio.run(player.play(request, SamplingConfig()))


class LostFront:
    """A front that was lost once an agent had posted its reward. Ray repeats `play`, which waits for one."""

    def __init__(self, gateway: Gateway) -> None:
        self.offer = SimpleNamespace(remote=self._offer)
        self.play = SimpleNamespace(remote=self._play)
        self._gateway = gateway

    async def _offer(self, *_: Any) -> Takeover:
        turns = session_of().snapshot()
        return Takeover(turns, goes_on=True)

    async def _play(self, name: str, url: str, key: str) -> None:
        transport = httpx.ASGITransport(self._gateway)
        headers = {"x-api-key": key}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://gateway", headers=headers
        ) as http:
            for body in ({"reward": 0.25, "response_id": "r0"}, {"reward": 0.75}):
                answer = await http.post(f"{url}/reward", json=body)
                assert answer.status_code == 200
        await asyncio.Event().wait()


def test_a_session_whose_reward_the_gateway_has_ends_without_the_front(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(players, "END_SECONDS", 0.01)
    engine: Any = SimpleNamespace(errored=False)
    gateway = Gateway(engine, ModelConfig("model"), RolloutConfig())
    front = LostFront(gateway)
    player = AgentPlayer(engine, RolloutConfig(), gateway, None, front, needs_reward=True)
    request = SampleRequest(
        "uid", 1, np.arange(3, dtype=np.int32), seed=5, start=EpisodeStart({}, "")
    )
    result, _ = asyncio.run(asyncio.wait_for(player.play(request, SamplingConfig()), 60))
    assert result.environment is not None
    assert (result.environment.reward, result.environment.failure) == (0.5, "")
