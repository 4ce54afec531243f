"""A request to the gateway and its answer, as events of ASGI. A retry reads the answer from the start."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from workers.engine.session_record import Node

Event = dict[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Exchange:
    """A request and its answer, as ASGI's events. A retry reads it from the start.

    seat: of the agent that asked, by which its turns are rewarded too, or empty. abandoned: whether a client
    left before its end. joined: retries that read it.
    """

    request: bytes
    idempotency: bytes
    seat: str = ""
    events: list[Event] = field(default_factory=list)
    held: list[Event] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    done: bool = False
    abandoned: bool = False
    joined: int = 0
    began: float = field(default_factory=time.monotonic)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    readers: set[asyncio.Event] = field(default_factory=set)

    def tell(self, *events: Event, done: bool = False) -> None:
        self.events += events
        self.done = self.done or done
        for reader in self.readers:
            reader.set()

    async def deliver(self, receive: Receive, send: Send) -> bool:
        """Send all events as they come. Returns False if the client has left before the last."""
        news = asyncio.Event()
        place = 0
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        disconnect.add_done_callback(lambda _: news.set())
        self.readers.add(news)
        try:
            while not disconnect.done():
                if place < len(self.events):
                    await send(self.events[place])
                    place += 1
                elif self.done:
                    return True
                else:
                    news.clear()
                    await news.wait()
            return False
        finally:
            self.readers.discard(news)
            disconnect.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_answer(send: Send, status: int, body: bytes) -> None:
    for event in answer_events(status, body):
        await send(event)


def answer_events(status: int, body: bytes) -> list[Event]:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    start = {"type": "http.response.start", "status": status, "headers": headers}
    return [start, {"type": "http.response.body", "body": body}]
