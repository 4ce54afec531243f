"""Limits on what an HTTP client may send or hold before its key is known, for all of our servers.

connection --Guard--> protocol of uvicorn or aiohttp
    too many connections, a head that is late or too long --> 503, 408 or 431, and the connection ends
"""

import asyncio
from collections.abc import Callable
from typing import Any

# Of a request's line and headers, which no library here limits in time and size.
HEAD_BYTES = 2**16
HEAD_SECONDS = 20.0
MOST_CONNECTIONS = 4096
REASONS = {
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class Guard(asyncio.Protocol):
    """Pass everything on to `inner`, unless a head breaks the limits."""

    def __init__(self, inner: Any, connections: set["Guard"]) -> None:
        """connections: the open ones of the server."""
        self._inner = inner
        self._connections = connections
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._begun = False
        self._refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._connections.add(self)
        self._inner.connection_made(transport)
        if len(self._connections) > MOST_CONNECTIONS:
            self._refuse(503)
        else:
            self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._waits_for_head():
            self._head_bytes += len(data)
            self._start_timer()
        self._inner.data_received(data)
        if not self._waits_for_head():
            self._head_bytes = 0
            self._stop_timer()
        elif self._head_bytes > HEAD_BYTES:
            self._refuse(431)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        self._connections.discard(self)
        self._inner.connection_lost(error)

    def eof_received(self) -> bool | None:
        value: bool | None = self._inner.eof_received()
        return value

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _waits_for_head(self) -> bool:
        if not self._begun:
            self._begun = _has_request(self._inner)
            return not self._begun
        return _is_between_requests(self._inner)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(
                HEAD_SECONDS, self._refuse, 408
            )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int) -> None:
        self._refused = True
        self._stop_timer()
        if not self._transport.is_closing():
            head = f"HTTP/1.1 {status} {REASONS[status]}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            self._transport.write(head.encode())
            self._transport.close()


def _has_request(inner: Any) -> bool:
    if hasattr(inner, "cycle"):  # uvicorn
        return inner.cycle is not None
    return bool(inner._messages) or inner._current_request is not None


def _is_between_requests(inner: Any) -> bool:
    """Whether the last request has its answer and its whole body has come."""
    if hasattr(inner, "cycle"):
        return bool(inner.cycle.response_complete and not inner.cycle.more_body)
    return inner._waiter is not None and not inner._messages


def guard_protocols(make_protocol: Callable[..., Any]) -> Callable[..., Guard]:
    """Return a factory of a server's protocols that guards them."""
    connections = set[Guard]()

    def make(*arguments: Any, **named: Any) -> Guard:
        return Guard(make_protocol(*arguments, **named), connections)

    return make


def uvicorn_config(app: Any, **settings: Any) -> Any:
    """Return a loaded `uvicorn.Config` whose connections are guarded."""
    import uvicorn

    config = uvicorn.Config(app, **settings)
    config.load()
    config.http_protocol_class = guard_protocols(config.http_protocol_class)  # type: ignore[assignment]
    return config
