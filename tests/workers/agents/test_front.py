"""The front over real sockets, before gateways that answer as told: no session is lost, and none is played
twice.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientError, ClientSession, web

from tests.refusals import refused
from workers.agents import front as module
from workers.agents.front import SessionFront, Takeover
from workers.engine.requests import Response
from workers.engine.session_record import Node, SessionRecord
from workers.errors import ConfigError, EpisodeError

KEY = "of-agents"
NOTHING = SessionRecord()


def node(number: int, parent: int = -1) -> Node:
    ids = np.array([number], np.int32)
    return Node(
        number,
        Response(ids, ids * 0.0, ids),
        "",
        {},
        [f"answer-{number}"],
        parent,
        received=True,
    )


@dataclass
class Gateway:
    """Answers with its name and the next id. hang: not before it is set. heard: (path, key, body) of each
    request.
    """

    name: str
    hang: asyncio.Event = field(default_factory=asyncio.Event)
    heard: list[tuple[str, str, str]] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)
    before: Callable[[], Awaitable[Any]] | None = None
    broken: bool = False
    left: int = 0  # clients that went away

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.hang.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.heard.append(
            (
                request.path_qs,
                request.headers["Authorization"],
                (await request.read()).decode(),
            )
        )
        try:
            await self.hang.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        if self.before:
            await self.before()
        name = f"answer-{next(self.numbers)}"
        if "stream" not in request.path:
            return web.json_response(
                {"id": name, "of": self.name},
                status=500 if self.broken else 400 if "bad" in request.path else 200,
            )
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(f"data: {name}\n\n".encode())
        self.hang.clear()
        await self.hang.wait()
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def die(self) -> None:
        self.hang.clear()
        await self.runner.cleanup()


class Stage:
    """A front, gateways, and an agent's HTTP client."""

    front: SessionFront
    http: ClientSession
    url: str

    def __init__(self) -> None:
        self.gateways: list[Gateway] = []
        self.tasks: list[asyncio.Task[Any]] = []

    def begin(self, what: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.create_task(what))
        return self.tasks[-1]

    async def gateway(self, name: str) -> Gateway:
        self.gateways.append(Gateway(name))
        await self.gateways[-1].start()
        return self.gateways[-1]

    async def ask(self, key: str = KEY) -> tuple[int, Any]:
        async with self.http.post(
            f"{self.url}/sessions", headers={"Authorization": f"Bearer {key}"}
        ) as answer:
            return answer.status, await answer.json() if answer.status != 204 else None

    async def call(
        self, path: str, body: Any = None, *, name: str = "s", key: str = ""
    ) -> tuple[int, Any]:
        headers = {"x-api-key": key or self.front.key_of(name)}
        async with self.http.post(
            f"{self.url}/sessions/{name}{path}", json=body, headers=headers
        ) as answer:
            return answer.status, await answer.json()

    async def status(self, path: str, body: Any = None, **options: str) -> int:
        return (await self.call(path, body, **options))[0]

    def offer(self, record: SessionRecord = NOTHING) -> asyncio.Task[Takeover]:
        return self.begin(self.front.offer("s", {}, record))

    def play(self, gateway: Gateway) -> asyncio.Task[None]:
        return self.begin(self.front.play("s", gateway.url, "1"))


@asynccontextmanager
async def staged(**settings: Any) -> AsyncIterator[Stage]:
    stage = Stage()
    stage.front = SessionFront(
        KEY, "127.0.0.1", 0, **({"max_request_mib": 0.01, "timeout_s": 30.0} | settings)
    )
    await stage.front.start()
    stage.url = f"http://127.0.0.1:{stage.front._listener.sockets[0].getsockname()[1]}"
    async with ClientSession() as stage.http:
        yield stage
        await stage.front.stop()
        for gateway in stage.gateways:
            gateway.hang.set()
            await gateway.runner.cleanup()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {
        "ASK_SECONDS": 0.3,
        "RETURN_SECONDS": 0.4,
        "REPEAT_SECONDS": 0.4,
        "AGAIN_SECONDS": 0.02,
    }.items():
        monkeypatch.setattr(module, name, seconds)


async def soon(condition: Callable[[], Any]) -> None:
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def test_an_agent_gets_a_session_plays_it_and_ends_it_once() -> None:
    async with staged() as stage:
        assert await stage.ask() == (204, None)
        offer = stage.begin(
            stage.front.offer("s", {"prompt": "ü", "n": np.int64(3)}, NOTHING)
        )
        status, given = await stage.ask()
        assert (status, given["record"]) == (200, {"prompt": "ü", "n": 3})
        assert (
            given["base_url"]
            == f"{given['session_url']}/v1"
            == f"{stage.url}/sessions/s/v1"
        )
        assert await offer == Takeover(NOTHING, goes_on=False, ended=False)
        # It was restarted and lacks one.
        assert not await stage.front.turn("s", SessionRecord((node(1),)), 2)
        assert await stage.front.turn("s", SessionRecord((node(0), node(1))), 2)
        assert await stage.front.turn("s", SessionRecord((node(9),)), 3)
        early = stage.begin(stage.call("/v1/chat?a=1", {"x": 1}, key=given["api_key"]))
        gateway = await stage.gateway("a")
        played = stage.begin(stage.front.play("s", f"{gateway.url}/s/inner", "secret"))
        assert await early == (200, {"id": "answer-0", "of": "a"})
        assert gateway.heard == [("/s/inner/v1/chat?a=1", "Bearer secret", '{"x": 1}')]

        async with stage.http.post(
            f"{stage.url}/sessions/s/v1/stream", headers={"x-api-key": given["api_key"]}
        ) as stream:
            # While the gateway still writes.
            assert await stream.content.readline() == b"data: answer-1\n"
            gateway.hang.set()
            assert (await stream.read()).endswith(b"[DONE]\n\n")

        assert (
            await stage.status("/reward", {"reward": 0.5, "response_id": "answer-0"}) == 200
        )
        headers = {
            "x-api-key": given["api_key"],
            "Content-Type": "application/json; charset=unknown",
        }
        body = b'{"reward": 0.5, "response_id": "answer-0"}'
        async with stage.http.post(
            f"{stage.url}/sessions/s/reward", data=body, headers=headers
        ) as posted:
            assert posted.status == 200  # the gateway reads no charset either
        assert await stage.status("/bad/reward", {"reward": 1}) == 400
        assert not played.done()
        assert await stage.status("/reward", {"reward": 1}, key=KEY) == 200
        await played
        assert await stage.status("/reward", {"reward": 1}) == 200  # its client asked again
        assert await stage.status("/v1/chat") == 410
        # The engine is lost before the driver has the sample.
        again = await stage.front.offer("s", {}, NOTHING)
        assert (again.goes_on, again.ended) == (True, True)
        assert again.record.rewards == {"answer-0": 0.5, "": 1.0}
        assert [each.received for each in again.record.nodes] == [True, True, False]
        await stage.front.forget(["s", "unknown"])
        assert await stage.status("/v1/chat") == 404


@pytest.mark.parametrize("how", ["hangs", "breaks", "answers 500"])
async def test_a_session_moves_with_its_turns_and_its_request_when_an_engine_is_lost(
    how: str,
) -> None:
    """The second answer was recorded and never reached the agent."""
    async with staged() as stage:
        offer = stage.offer()
        await stage.ask()
        await offer
        first, second = await stage.gateway("a"), await stage.gateway("b")
        lost = stage.play(first)
        first.before = lambda: stage.front.turn("s", SessionRecord((node(0),)), 1)
        assert (await stage.call("/v1/chat"))[1]["of"] == "a"
        await stage.front.turn("s", SessionRecord((node(1),)), 2)
        first.before = None
        first.broken = how == "answers 500"
        if not first.broken:
            first.hang.clear()
        waiting = stage.begin(stage.call("/v1/chat", "again"))
        await soon(lambda: len(first.heard) > 1)
        if how == "breaks":
            await first.die()
        taken = await stage.front.offer("s", {}, NOTHING)
        assert (taken.goes_on, [each.received for each in taken.record.nodes]) == (
            True,
            [True, False],
        )
        moved = stage.play(second)
        assert await waiting == (200, {"id": "answer-0", "of": "b"})
        assert second.heard == [("/v1/chat", "Bearer 1", '"again"')]
        await stage.call("/reward", {"reward": None})
        await asyncio.gather(lost, moved)


async def test_a_client_that_goes_away_is_not_answered_for_and_a_cut_stream_is_seen() -> (
    None
):
    async with staged() as stage:
        stage.offer()
        await stage.ask()
        gateway = await stage.gateway("a")
        stage.play(gateway)
        headers = {"x-api-key": stage.front.key_of("s")}
        async with stage.http.post(
            f"{stage.url}/sessions/s/v1/stream", headers=headers
        ) as stream:
            await stream.content.readline()
            await gateway.die()
            with pytest.raises(ClientError):
                await stream.read()
        other = await stage.gateway("b")
        stage.play(other)
        other.hang.clear()
        gone = stage.begin(stage.call("/v1/chat"))
        await soon(lambda: other.heard)
        gone.cancel()
        await soon(lambda: other.left == 1)


@pytest.mark.parametrize("returns", [True, False])
async def test_a_recorded_session_waits_for_its_agent_and_then_starts_again(
    returns: bool,
) -> None:
    async with staged() as stage:
        record = SessionRecord((node(0), replace(node(1), received=False)), {"": 1.0})
        offer = stage.offer(record)
        gateway = await stage.gateway("a")
        assert (await stage.ask())[0] == 204
        if returns:
            call = stage.begin(stage.call("/v1/chat"))
        else:
            assert (await stage.ask())[0] == 200
        taken = await offer
        assert (taken.goes_on, taken.ended, taken.record.rewards) == (
            returns,
            False,
            {"": 1.0},
        )
        assert [each.received for each in taken.record.nodes] == [True, False]
        stage.play(gateway)
        if returns:
            assert (await call)[0] == 200
        assert (await stage.ask())[0] == 204


async def test_many_agents_get_every_session_once() -> None:
    async with staged() as stage:
        names = [str(number) for number in range(300)]
        offers = [stage.begin(stage.front.offer(name, {}, NOTHING)) for name in names]
        asked = await asyncio.gather(*[stage.ask() for _ in range(320)])
        await asyncio.gather(*offers)
        assert sorted(given["id"] for status, given in asked if status == 200) == sorted(
            names
        )


async def test_what_is_not_allowed_is_refused_in_the_apis_form() -> None:
    async with staged(timeout_s=0.3) as stage:
        assert (await stage.ask("guess"))[0] == 401
        offers = [stage.begin(stage.front.offer(name, {}, NOTHING)) for name in ("s", "t")]
        assert (await stage.ask())[0] == 200
        assert await stage.status("/v1/chat", name="t") == 404  # nobody has it yet
        status, refusal = await stage.call("/v1/messages", key=stage.front.key_of("t"))
        assert (status, refusal["type"], refusal["error"]["type"]) == (
            401,
            "error",
            "authentication_error",
        )
        assert await stage.status("/v1/chat", key="ü") == 401
        gateway = await stage.gateway("a")
        stage.play(gateway)
        assert await stage.status("/v1/chat", "x" * 20_000) == 413
        assert gateway.heard == []
        with pytest.raises(EpisodeError):  # no agent asks for the other
            await offers[1]
        taken = SessionFront(
            KEY,
            "127.0.0.1",
            int(stage.url.rpartition(":")[2]),
            max_request_mib=1,
            timeout_s=1,
        )
        with refused("rollout.gateway.port", ConfigError):
            await taken.start()


async def test_an_agent_asks_a_front_that_was_lost_before_its_calls_are_repeated() -> None:
    async with staged() as stage:
        gateway = await stage.gateway("a")
        call = stage.begin(stage.call("/v1/chat"))
        turn = stage.begin(stage.front.turn("s", SessionRecord((node(3),)), 4))
        await asyncio.sleep(0.05)
        stage.play(gateway)
        assert await call == (200, {"id": "answer-0", "of": "a"})
        assert not await turn, "the front has none of the earlier turns"
        await asyncio.sleep(module.REPEAT_SECONDS)
        assert await stage.status("/v1/chat", name="other") == 404


@pytest.mark.parametrize("sent_again", [True, False])
async def test_an_engine_that_is_lost_after_the_front_loses_no_turn(
    *, sent_again: bool
) -> None:
    """The turns are those that the engine sent again, or those of its last snapshot."""
    async with staged() as stage:
        gateway = await stage.gateway("a")
        stage.play(gateway)
        await soon(lambda: stage.front._held)
        turns = SessionRecord(
            (node(0), replace(node(1), received=False)), {"answer-0": 0.5}
        )
        if sent_again:
            assert await stage.front.turn("s", turns, 2)
        takeover = await stage.front.offer(
            "s", {}, SessionRecord() if sent_again else turns
        )
        assert takeover.goes_on and not takeover.ended
        assert [turn.received for turn in takeover.record.nodes] == [True, False]
        assert takeover.record.rewards == {"answer-0": 0.5}


async def test_an_agent_has_a_session_once_its_engine_knows() -> None:
    """Otherwise a front that is lost in between would offer it to another agent."""
    async with staged() as stage:
        offer = stage.offer()
        ask = stage.begin(stage.ask())
        await offer
        await asyncio.sleep(0.05)
        assert not ask.done()
        gateway = await stage.gateway("a")
        stage.play(gateway)
        assert (await ask)[0] == 200
