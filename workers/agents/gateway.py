"""Gateway: sessions of agents over HTTP, in the event loop of an engine's actor.

    agent --/s/SESSION/v1/chat/completions, key--> Gateway: limits, retries --> [vLLM's routes] --> engine
                                                      '--> Session: the answer as a turn, before its end

An answer is completed without its client, so that a retry can read it. Nothing but the listed routes is
reachable.
"""

import asyncio
import hashlib
import hmac
import itertools
import json
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from workers.agents.api_forms import answers_in, error_body
from workers.agents.exchange import (
    Event,
    Exchange,
    Receive,
    RefusedError,
    Send,
    answer_events,
    send_answer,
)
from workers.agents.recording_client import RecordingClient
from workers.agents.routes import build
from workers.agents.session import Session
from workers.agents.session_requests import CALL, OpenSession, SessionRequest
from workers.config.roles import ModelConfig, RolloutConfig, SamplingConfig
from workers.engine.adapters import EngineAdapters
from workers.engine.image_inputs import ImageInputs
from workers.engine.kept_caches import KeptCaches
from workers.engine.session_record import Node
from workers.errors import DataError, describe_error
from workers.http_limits import uvicorn_config
from workers.rendering import Options
from workers.user_code.session_keys import new_session_key

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

SAMPLED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
ROUTES = {
    ("GET", "/v1/models"),
    *(("POST", path) for path in (*SAMPLED, "/v1/messages/count_tokens", "/reward")),
}
SEAT = b"x-session-id"  # header by which an agent's client may tell its agents apart, as verifiers' does
BODY_SECONDS = 60.0  # for a client to send a request
CLOSE_SECONDS = 5.0
# vLLM streams so a call that was cut; clients that send it back are refused. In texts, quotes are escaped.
CALL_WITHOUT_ARGUMENTS = re.compile(rb'("function":\{"name":"(?:[^"\\]|\\.)*")\}')
# Clients keep connections: with a short time, they write to one that closes.
KEEP_ALIVE_SECONDS = 600
OnTurns = Callable[[Sequence[Node]], Awaitable[None]]
OnEnd = Callable[[], None]


@dataclass(frozen=True)
class Access:
    """What an agent needs. base_url: for OpenAI's clients. session_url: for Anthropic's, and for rewards."""

    base_url: str
    session_url: str
    key: str


@dataclass(eq=False, kw_only=True)
class ServedSession(OpenSession):
    """A session at the gateway."""

    key: str
    on_turns: OnTurns | None
    on_end: OnEnd | None
    began: float = field(default_factory=time.monotonic)
    exchanges: set[Exchange] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def find_repeated(
        self, request: bytes, idempotency: bytes, retried: bool
    ) -> Exchange | None:
        """Return the exchange that a request repeats: of its key, one that a client left, or for
        a retry any.
        """
        same = [exchange for exchange in self.exchanges if exchange.request == request]
        matches = [
            exchange
            for exchange in same
            if idempotency and exchange.idempotency == idempotency
        ]
        matches = (
            matches
            or [exchange for exchange in same if exchange.abandoned]
            or (same if retried else [])
        )
        return max(matches, key=lambda exchange: exchange.began, default=None)


class Gateway:
    """Serve the sessions that are open. Also vLLM's server of HTTP, as an application of ASGI."""

    def __init__(
        self,
        engine: "AsyncLLM",
        model: ModelConfig,
        rollout: RolloutConfig,
        caches: KeptCaches | None = None,
        images: ImageInputs | None = None,
        adapters: EngineAdapters | None = None,
    ) -> None:
        self._engine = engine
        self._model = model
        self._rollout = rollout
        self._caches = caches or KeptCaches(rollout)
        self._images = images or ImageInputs(engine)
        self._adapters = adapters or EngineAdapters(engine)
        self._limits = rollout.gateway
        self._open: dict[str, ServedSession] = {}
        self._app: Any = None
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self, host: str = "127.0.0.1") -> None:
        """Listen on a free port of `host`. Raises OSError if the address cannot be used."""
        from transformers import AutoTokenizer

        tokenizer = await asyncio.to_thread(
            AutoTokenizer.from_pretrained, self._model.path, trust_remote_code=False
        )
        client = RecordingClient(self._engine, self._caches, self._images, self._adapters)
        self._app = await build(client, self._model, self._rollout, tokenizer)
        await self.listen(self, host)

    async def listen(self, app: Any, host: str = "127.0.0.1") -> None:
        """Serve an application of ASGI."""
        import uvicorn

        listener = socket.create_server((host, 0), backlog=4096)
        address, port = listener.getsockname()[:2]
        settings: dict[str, Any] = {
            "lifespan": "off",
            "ws": "none",
            "log_config": None,
            "access_log": False,
        }
        settings |= {
            "server_header": False,
            "date_header": False,
            "timeout_keep_alive": KEEP_ALIVE_SECONDS,
        }
        self._server = uvicorn.Server(uvicorn_config(app, **settings))
        self._server.capture_signals = nullcontext  # they are the actor's
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self.url = f"http://{address}:{port}"

    async def stop(self) -> None:
        for opened in list(self._open.values()):
            await self.close(opened.session)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving
            self._server = self._serving = None

    def open(
        self,
        session: Session,
        sampling: SamplingConfig,
        seed: int,
        options: Options,
        *,
        on_turns: OnTurns | None = None,
        on_end: OnEnd | None = None,
        priority: int = 0,
        image_pixels: tuple[int, int] = (0, 2**20),
    ) -> Access:
        """Let an agent play the session. on_turns: awaited with new turns before their answer's last bytes go
        out. on_end: called when the agent posts the session's reward.

        image_pixels: `data.image_pixels`, for images that the agent sends.
        """
        name = quote(session.name, safe="")
        key = new_session_key()
        self._open[name] = ServedSession(
            session,
            sampling,
            seed,
            options,
            priority,
            image_pixels,
            key=key,
            on_turns=on_turns,
            on_end=on_end,
        )
        return Access(f"{self.url}/s/{name}/v1", f"{self.url}/s/{name}", key)

    async def close(self, session: Session) -> None:
        """End the session's requests. Later ones are answered with an error."""
        name = quote(session.name, safe="")
        opened = self._open.pop(name, None)
        if opened is None:
            return
        for exchange in opened.exchanges:
            exchange.cancelled.set()
        if opened.engine_names:
            with suppress(Exception):  # of an engine that died
                await self._engine.abort(list(opened.engine_names))
        if opened.tasks:
            _, late = await asyncio.wait(opened.tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()

    # --- requests

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        path = scope["raw_path"].decode("latin-1")
        try:
            await self._answer(scope, path, dict(scope["headers"]), receive, send)
        except RefusedError as refused:
            await send_answer(
                send, refused.status, error_body(path, refused.status, str(refused))
            )

    async def _answer(
        self,
        scope: Event,
        path: str,
        headers: dict[bytes, bytes],
        receive: Receive,
        send: Send,
    ) -> None:
        match = re.fullmatch(r"/s/([^/]+)(/.*)?", path)
        if match is None:
            raise RefusedError(404, "there is no such route. Use the session's URL.")
        opened = self._find_session(match[1], headers)
        route = match[2] or ""
        if (scope["method"], route) not in ROUTES:
            raise RefusedError(
                404, f"{scope['method']} {route or '/'}: a session has no such route."
            )
        body = await self._body(headers, receive)
        if body is None:  # the client has left
            return
        if route == "/reward":
            response_id = _reward(opened.session, body)
            if not response_id and opened.on_end is not None:
                opened.on_end()
            await send_answer(send, 200, b"{}")
            return
        exchange = self._exchange(opened, scope, route, headers, body)
        delivered = await exchange.deliver(receive, send)
        for node in exchange.nodes:
            node.received = node.received or delivered
        exchange.abandoned = not delivered and not any(
            node.received for node in exchange.nodes
        )
        if exchange.done and not exchange.nodes:  # a retry is another try
            opened.exchanges.discard(exchange)

    def _find_session(self, name: str, headers: dict[bytes, bytes]) -> ServedSession:
        """Return the session. Raises RefusedError for a wrong key, and for one that is not open."""
        credential = headers.get(b"x-api-key") or headers.get(
            b"authorization", b""
        ).removeprefix(b"Bearer ")
        opened = self._open.get(name)
        if opened is None or not hmac.compare_digest(credential, opened.key.encode()):
            raise RefusedError(
                401,
                "the key does not belong to an open session. Use the session's URL and key.",
            )
        return opened

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """Read a request. Returns None if the client leaves before its end."""
        limit = int(self._limits.max_request_mib * 2**20)
        too_large = RefusedError(
            413,
            f"rollout.gateway.max_request_mib={self._limits.max_request_mib:g}: larger body.",
        )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise RefusedError(400, "content-length: not a number.")
        if int(length) > limit:
            raise too_large
        parts = []
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while (event := await receive())["type"] == "http.request":
                    parts.append(event.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_large
                    if not event.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise RefusedError(
                408, f"the body did not arrive within {BODY_SECONDS:g} s."
            ) from None
        return None

    def _exchange(
        self,
        opened: ServedSession,
        scope: Event,
        route: str,
        headers: dict[bytes, bytes],
        body: bytes,
    ) -> Exchange:
        """Return the exchange that a request repeats, or begin one. Raises RefusedError above the session's
        limit.
        """
        request = hashlib.blake2b(route.encode() + body).digest()
        idempotency = headers.get(b"idempotency-key", b"")
        exchange = opened.find_repeated(
            request, idempotency, headers.get(b"x-stainless-retry-count", b"0") != b"0"
        )
        if exchange is not None and route in SAMPLED:
            exchange.joined = exchange.joined + 1
            exchange.abandoned = False
            for node in exchange.nodes:
                node.joined += 1
            return exchange
        limit = self._limits.max_concurrent_requests
        if len(opened.tasks) >= limit:
            raise RefusedError(
                429,
                f"rollout.gateway.max_concurrent_requests={limit}: as many are under way.",
            )
        exchange = Exchange(
            request, idempotency, headers.get(SEAT, b"").decode(errors="replace")
        )
        opened.exchanges.add(exchange)
        task = asyncio.create_task(self._run(opened, exchange, scope, route, body))
        opened.tasks.add(task)
        task.add_done_callback(opened.tasks.discard)
        return exchange

    async def _run(
        self,
        opened: ServedSession,
        exchange: Exchange,
        scope: Event,
        route: str,
        body: bytes,
    ) -> None:
        """Answer a request, whether or not its client stays. vLLM gets no header of the client's: some change
        it.
        """
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        scope = {
            **scope,
            "path": route,
            "raw_path": route.encode(),
            "query_string": b"",
            "headers": headers,
        }
        call = SessionRequest(opened, route in SAMPLED, len(body))
        CALL.set(call)
        request_events: list[Event] = [
            {"type": "http.request", "body": body, "more_body": False}
        ]

        async def receive() -> Event:
            if request_events:
                return request_events.pop()
            await exchange.cancelled.wait()
            return {"type": "http.disconnect"}

        async def put(event: Event) -> None:
            if event.get("body", b"").startswith(b"data: "):
                event = event | {
                    "body": CALL_WITHOUT_ARGUMENTS.sub(
                        rb'\1,"arguments":""}', event["body"]
                    )
                }
            if (
                call.done
                or route not in SAMPLED
                or exchange.held
                or event.get("status", 200) >= 400
            ):
                exchange.held.append(event)
            else:
                exchange.tell(event)

        last: list[Event] = []
        try:
            await self._app(scope, receive, put)
            last = await self._end_exchange(opened, exchange, call, route)
        except Exception as error:
            exchange.nodes = []  # nobody receives them
            last = (
                []
                if exchange.events
                else answer_events(500, error_body(route, 500, describe_error(error)))
            )
        finally:
            call.reserved.close()
            exchange.tell(*last, done=True)

    async def _end_exchange(
        self, opened: ServedSession, exchange: Exchange, call: SessionRequest, route: str
    ) -> list[Event]:
        """Add the answer's turns to the session, and return the answer's last events."""
        if exchange.cancelled.is_set():
            return (
                []
                if exchange.events
                else answer_events(410, error_body(route, 410, "the session is closed."))
            )
        events = [*exchange.events, *exchange.held]
        status = int(events[0]["status"])
        body = b"".join(event.get("body", b"") for event in events)
        if call.done:
            name, answers = answers_in(body) if status == 200 else ("", {})
            call.reserved.close()  # the turns count as sampled from here on
            exchange.nodes = list(_nodes(opened.session, call, name, answers))
            for node in exchange.nodes:
                node.names += [exchange.seat] if exchange.seat else []
                node.joined += exchange.joined
                node.began, node.seconds = (
                    exchange.began - opened.began,
                    time.monotonic() - exchange.began,
                )
            if opened.on_turns is not None:
                await opened.on_turns(exchange.nodes)
        if status >= 400 and not exchange.events:
            return answer_events(status, error_body(route, status, _message(body)))
        return exchange.held


def _nodes(
    session: Session, call: SessionRequest, name: str, answers: dict[int, dict[str, Any]]
) -> Iterator[Node]:
    """Add the answers to the session, in the order of their choices."""
    messages = (answers.get(index) for index in itertools.count())
    for prompt in call.prompts:
        of_chat = bool(prompt.asked.messages)
        for node in prompt.replayed:
            if (message := next(messages)) and of_chat:
                session.also(node, message)
            node.names.append(name)
            yield node
        for place, number in enumerate(prompt.numbers):
            response, text = prompt.turns[place]
            message = next(messages) if of_chat else None
            add = partial(session.add, prompt.asked, prompt.ids, images=prompt.images)
            yield add(response, number=number, message=message, text=text, name=name)


def _message(body: bytes) -> str:
    """Return what an error of vLLM or FastAPI says."""
    with suppress(ValueError):
        document = json.loads(body)
        error = document.get("error") or document.get("detail") or document
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return body.decode(errors="replace")


def _reward(session: Session, body: bytes) -> str:
    """Take {"reward": number or null, "response_id": optional}. Raises RefusedError for another body.

    Returns the response's id, or an empty text for the session's reward.
    """
    try:
        fields = json.loads(body)
        response_id = fields.get("response_id") or ""
        if fields["reward"] is not None:
            session.reward(fields["reward"], response_id)
        return response_id
    except DataError as error:
        raise RefusedError(400, str(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RefusedError(
            400, 'the body is not {"reward": number, "response_id": optional}.'
        ) from None
