"""SessionFront: agents elsewhere ask it for sessions, and reach through it the engine that has theirs.

    agent --POST /sessions-------> a waiting session: base URL, key, record
          --/sessions/NAME/v1/...> gateway of the rollout actor that has it. URL and key stay when it moves
          --/sessions/NAME/reward> the end

    rollout actor --offer--> taken --play--> ended           turn: before an answer reaches the agent

If an engine is lost, its session is offered again by name and continues from the turns that the front has.
If the front is lost, Ray starts it again without sessions, and repeats the calls that wait there.
"""

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from workers.agents.api_forms import error_body
from workers.agents.processes import as_json
from workers.engine.session_record import SessionRecord
from workers.errors import ConfigError, EpisodeError
from workers.http_limits import guard_protocols

ASK_SECONDS = 20.0  # that a request waits for a session
# Seconds that a recorded session waits for its agent, before another starts it again.
RETURN_SECONDS = 30.0
# Seconds after a start, in which Ray repeats the calls of a front that was lost.
REPEAT_SECONDS = 30.0
AGAIN_SECONDS = 0.5  # between tries to reach a lost engine's gateway
# Of a request. An engine that dies may cause some, before its agent sees one.
SERVER_ERRORS = 10
STOP_SECONDS = 1.0  # for open requests
BACKLOG = 4096
HEAD_BYTES = 4096  # of an answer, which hold its id
KEPT_HERE = {
    "host",
    "connection",
    "transfer-encoding",
    "content-length",
    "content-encoding",
    "accept-encoding",
    "date",
}
KEPT_HERE |= {"server", "authorization", "x-api-key"}
MIB = 2**20


@dataclass(frozen=True)
class Takeover:
    """goes_on: whether the agent has seen answers of `record`. ended: whether it has posted its
    reward, too.
    """

    record: SessionRecord
    goes_on: bool = False
    ended: bool = False


@dataclass
class _Held:
    """A session. place: URL and key at its gateway, reached by `client`. delivered: ids of the agent's
    answers.
    """

    task: Any
    record: SessionRecord
    place: tuple[str, str] = ("", "")
    client: ClientSession | None = None
    goes_on: bool = False
    delivered: set[str] = field(default_factory=set)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def add_record(self, record: SessionRecord) -> None:
        """Add turns that the front lacks. Those that a client received are the agent's."""
        nodes = {node.number: node for node in (*record.nodes, *self.record.nodes)}
        self.record = SessionRecord(
            tuple(nodes.values()), record.rewards | self.record.rewards
        )
        self.add_received(record)

    def add_received(self, record: SessionRecord) -> None:
        for node in record.nodes:
            if node.received:
                self.delivered.update(node.names)

    def deliver(self, head: bytes) -> None:
        """Note which answers begin so."""
        self.delivered |= {
            name
            for node in self.record.nodes
            for name in node.names
            if name.encode() in head
        }

    def seen(self) -> SessionRecord:
        """The record, in which a turn counts as received if the agent has its answer."""
        nodes = [
            replace(node, received=not self.delivered.isdisjoint(node.names))
            for node in self.record.nodes
        ]
        return replace(self.record, nodes=tuple(nodes))


class SessionFront:
    """Wrapped by `ray.remote`, which may restart it and repeat calls. HTTP is served by the same
    event loop.
    """

    def __init__(
        self, key: str, host: str, port: int, *, max_request_mib: float, timeout_s: float
    ) -> None:
        """key: of agents that ask for sessions. timeout_s: rollout.agent_timeout_s."""
        self._key = key
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._most_bytes = int(max_request_mib * MIB)
        self._held: dict[str, _Held] = {}
        self._waiting: asyncio.Queue[str] = asyncio.Queue()
        self._began = time.monotonic()
        self._active = self._began  # when an agent last was
        self._listening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError if the port is not free."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())
        await asyncio.shield(self._listening)

    async def _listen(self) -> None:
        app = web.Application(client_max_size=self._most_bytes, middlewares=[_as_json])
        app.router.add_post("/sessions", self._ask)
        app.router.add_post("/sessions/{name}{rest:/reward}", self._reward)
        app.router.add_route("*", "/sessions/{name}{rest:.*}", self._pass_on)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_SECONDS
        )
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        try:
            # Not a TCPSite, which has no limits on heads that do not end.
            self._listener = await asyncio.get_running_loop().create_server(
                guard_protocols(server), self._host, self._port, backlog=BACKLOG
            )
        except OSError as error:
            raise ConfigError(
                f"rollout.gateway.port={self._port}: nothing can listen there on "
                f"rollout.gateway.host={self._host} ({error.strerror}). Choose another."
            ) from None

    async def stop(self) -> None:
        await self.forget(list(self._held))
        self._listener.close()
        await self._runner.cleanup()

    # --- for rollout actors and the driver

    async def offer(self, name: str, task: Any, record: SessionRecord) -> Takeover:
        """Wait until an agent takes the session. record: what a checkpoint or an engine's snapshot has of it.

        Raises EpisodeError if no agent is active for rollout.agent_timeout_s.
        """
        await self.start()
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = _Held(task, record)
            held.add_received(record)
            wait_s = RETURN_SECONDS if record.nodes else 0.0
            asyncio.get_running_loop().call_later(wait_s, self._waiting.put_nowait, name)
        elif not held.record.nodes:  # of a front that was lost since the last turn
            held.add_record(record)
        held.goes_on = held.taken.is_set()
        since = time.monotonic()
        while not held.taken.is_set():
            remaining_s = max(since, self._active) + self._timeout_s - time.monotonic()
            if remaining_s <= 0:
                raise EpisodeError(
                    f"rollout.agent_timeout_s={self._timeout_s:g}: no agent asked for a session in that "
                    "time. Start agents that call POST /sessions (see docs/agents.md)."
                )
            with suppress(TimeoutError):
                await asyncio.wait_for(held.taken.wait(), remaining_s)
        return Takeover(held.seen(), held.goes_on, held.ended.is_set())

    async def play(self, name: str, url: str, key: str) -> None:
        """Pass requests on to this session of a gateway until the agent ends it."""
        await self.start()
        # A restarted front knows none.
        held = self._held.setdefault(name, _Held(None, SessionRecord()))
        held.taken.set()
        old_client = held.client
        held.place = (url, key)
        held.client = ClientSession(
            connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None)
        )
        if old_client is not None:
            await old_client.close()  # what waits there tries again here
        held.placed.set()
        await held.ended.wait()

    async def turn(self, name: str, news: SessionRecord, turn_count: int) -> bool:
        """Keep turns whose answers go out next. Returns False if the front then has others than the
        `turn_count` ones.

        News of all turns replace what it has.
        """
        held = await self._wait_for_session(name)
        if held is None:
            return True
        old_nodes = held.record.nodes
        if len(news.nodes) == turn_count:
            old_nodes = ()
            held.add_received(news)
        nodes = {node.number: node for node in (*old_nodes, *news.nodes)}
        held.record = SessionRecord(tuple(nodes.values()), news.rewards)
        return len(nodes) == turn_count

    async def forget(self, names: Sequence[str]) -> None:
        """Drop sessions whose sample has reached the driver, or failed."""
        for name in names:
            if held := self._held.pop(name, None):
                held.ended.set()
                if held.client is not None:
                    await held.client.close()

    async def _wait_for_session(self, name: str) -> _Held | None:
        """Return a session, or None for an unknown one.

        A front that was lost knows it once its call is repeated.
        """
        while name not in self._held and time.monotonic() < self._began + REPEAT_SECONDS:
            await asyncio.sleep(AGAIN_SECONDS)
        return self._held.get(name)

    # --- for agents

    def key_of(self, name: str) -> str:
        return hmac.new(self._key.encode(), name.encode(), hashlib.sha256).hexdigest()

    async def _ask(self, request: web.Request) -> web.Response:
        self._check(request, self._key)
        try:
            origin = request.url.origin()
        except ValueError:
            raise web.HTTPBadRequest(text="The header Host is not an address.") from None
        deadline = time.monotonic() + ASK_SECONDS
        held = None
        while held is None or held.taken.is_set():
            try:
                name = await asyncio.wait_for(
                    self._waiting.get(), deadline - time.monotonic()
                )
            except TimeoutError:
                return web.Response(status=204, headers={"Retry-After": "1"})
            held = self._held.get(name)
        held.taken.set()
        # Until its engine knows, a front that is lost would offer the session to another agent, too.
        with suppress(TimeoutError):
            await asyncio.wait_for(held.placed.wait(), deadline - time.monotonic())
        url = f"{origin}/sessions/{name}"
        access = {
            "id": name,
            "base_url": f"{url}/v1",
            "session_url": url,
            "api_key": self.key_of(name),
        }
        return web.json_response(access | {"record": held.task}, dumps=as_json)

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        """Set the reward of a response, or of the session, which ends it."""
        held = await self._find_session(request)
        if held.ended.is_set():  # the answer was lost
            return web.json_response({"ended": True})
        answer = await self._relay(request, held)
        if answer.status == 200:
            # Not request.json, which raises for a charset nobody knows.
            body = json.loads(await request.read())
            name = body.get("response_id") or ""
            reward = {} if body["reward"] is None else {name: float(body["reward"])}
            held.record = replace(held.record, rewards=held.record.rewards | reward)
            if not name:
                held.ended.set()
        return answer

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        return await self._relay(request, await self._find_session(request))

    async def _find_session(self, request: web.Request) -> _Held:
        """Return the session of a request, which its agent thereby takes again."""
        name = request.match_info["name"]
        self._check(request, self.key_of(name), self._key)
        held = await self._wait_for_session(name)
        if held is None or not (held.taken.is_set() or held.record.nodes):
            raise web.HTTPNotFound(
                text="No such session is under way. Ask for one: POST /sessions."
            )
        if not held.taken.is_set():
            held.goes_on = True
            held.taken.set()
        self._active = time.monotonic()
        return held

    def _check(self, request: web.Request, *keys: str) -> None:
        credential = request.headers.get("x-api-key") or request.headers.get(
            "Authorization", ""
        ).removeprefix("Bearer ")
        # Which stands for bytes that are not UTF-8.
        sent = credential.encode(errors="surrogateescape")
        # `any` would stop at the first.
        if not sum(hmac.compare_digest(sent, key.encode()) for key in keys):
            raise web.HTTPUnauthorized(text="The key is wrong.")

    async def _relay(self, request: web.Request, held: _Held) -> web.StreamResponse:
        """Pass a request on, and its answer back. If the engine is lost before the answer began, try the next
        one.
        """
        body, answer, errors = await request.read(), None, 0
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in KEPT_HERE
        }
        while not held.ended.is_set():
            await held.placed.wait()
            assert held.client is not None
            (url, key), client = held.place, held.client
            url += request.match_info["rest"]
            headers["Authorization"] = f"Bearer {key}"
            try:
                async with client.request(
                    request.method, url, params=request.query, data=body, headers=headers
                ) as response:
                    if response.status >= 500 and errors < SERVER_ERRORS:
                        errors += 1
                        raise ClientError
                    content = (
                        b""
                        if response.content_type == "text/event-stream"
                        else await response.read()
                    )
                    answer_headers = {
                        name: value
                        for name, value in response.headers.items()
                        if name.lower() not in KEPT_HERE
                    }
                    answer = web.StreamResponse(
                        status=response.status, headers=answer_headers
                    )
                    head = content[:HEAD_BYTES]
                    await answer.prepare(request)
                    await answer.write(content)
                    async for part in response.content.iter_any():  # of a stream
                        head += part[: HEAD_BYTES - len(head)]
                        await answer.write(part)
                    await answer.write_eof()
                    held.deliver(head)
                    return answer
            except (ClientError, OSError):
                # An answer cannot begin twice: the agent sees that it was cut, and asks again.
                if answer is not None:
                    if request.transport is not None:
                        request.transport.close()
                    return answer
                with suppress(TimeoutError):
                    await asyncio.wait_for(held.ended.wait(), AGAIN_SECONDS)
        raise web.HTTPGone(text="The session has ended.")


@web.middleware
async def _as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        body = error_body(request.path, error.status, error.text or error.reason)
        return web.Response(body=body, status=error.status, content_type="application/json")
