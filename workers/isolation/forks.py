"""ForkPool: processes of one user's object, forked from a process that has imported it once.

    ForkPool --file descriptor of a socket--> source process: answer = prepare(payload)
        |                                         | fork
        +--request, pickled--> answer(request) in a process of its own --JSON--> ForkPool
                                  |
              used again; killed if it is not given back; forgotten if it is dead

A fork takes milliseconds and shares the memory of imports, so that hundreds can run side by side.
"""

import asyncio
import io
import json
import os
import pickle
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, TextIO

from workers.isolation.process import (
    HEADER,
    SECRET,
    START_SECONDS,
    Channel,
    EndedError,
    Process,
    answer_size,
    end_with_parent,
    framed,
    reply,
    resolve,
)


@dataclass
class Fork:
    """A forked process. handle: its pidfd, which no later process can have. secret: see `workers.isolation.process`."""

    pid: int
    handle: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    secret: bytes

    async def call(self, request: Any, timeout_s: float) -> Any:
        """The answer to a request. Raises TimeoutError after `timeout_s`, EOFError if the process ends before, OSError
        or ValueError if no answer can be read."""
        async with asyncio.timeout(timeout_s):
            self.writer.write(framed(self.secret, pickle.dumps(request)))
            await self.writer.drain()
            return await _answer(self.reader, self.secret)

    def kill(self) -> None:
        """Kill it, and what it has started if it still runs."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, 0)  # it lives, so that the group of its number is its own
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self.handle)
        self.writer.close()


class ForkPool:
    """Forked processes that answer requests; as many as are taken at a time."""

    def __init__(self, prepare: str, payload: bytes, *, silent: bool = False) -> None:
        """prepare: `module:function` of ours, which makes of the payload the function that answers requests with JSON.
        silent: whether what the processes write to stderr is thrown away."""
        self._prepare, self._payload = prepare, payload
        self._errors: TextIO | None = io.StringIO() if silent else None
        self._source: Process | None = None
        self._starting = asyncio.Lock()
        self._idle: list[Fork] = []

    async def take(self) -> Fork:
        """A process that answers nobody else; the caller gives it back or kills it.

        Raises EndedError if the payload cannot be prepared, OSError or ValueError if no process can be forked.
        """
        while self._idle:
            fork = self._idle.pop()
            if not fork.reader.at_eof():
                return fork
            fork.kill()
        async with self._starting:
            source = await asyncio.to_thread(self._living_source)
        return await _forked(source)

    def give_back(self, fork: Fork) -> None:
        """Let the process be taken again."""
        self._idle.append(fork)

    def _living_source(self) -> Process:
        """The source process; started if there is none, or it died."""
        if self._source is None or not self._source.alive:
            self._end_source()
            self._source = Process("workers.isolation.forks:fork_on_request", errors=self._errors)
            try:
                self._source.send((self._prepare, self._payload))
                self._source.receive(START_SECONDS)
            except TimeoutError:
                raise EndedError(self._source.end()) from None
        return self._source

    async def stop(self) -> None:
        """End all processes; another `take` starts them again."""
        idle, self._idle = self._idle, []
        for fork in idle:
            fork.kill()
        await asyncio.to_thread(self._end_source)

    def _end_source(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.end()  # its forks die with it


async def _forked(source: Process) -> Fork:
    ours, theirs = socket.socketpair()
    secret = os.urandom(SECRET)
    try:
        with theirs:
            send_handle(source.socket, theirs.fileno(), None)
        ours.sendall(secret)
        reader, writer = await asyncio.open_connection(sock=ours)
        async with asyncio.timeout(START_SECONDS):
            pid = await _answer(reader, secret)
        return Fork(pid, os.pidfd_open(pid), reader, writer, secret)
    except BaseException:
        ours.close()
        raise


async def _answer(reader: asyncio.StreamReader, secret: bytes) -> Any:
    size = answer_size(secret, await reader.readexactly(HEADER))
    return json.loads(await reader.readexactly(size))


# The functions below run in the processes.


def fork_on_request(channel: Channel) -> None:
    """Prepare the payload, then fork a process for every socket that comes, until the other side is gone."""
    prepare, payload = channel.recv()
    answer = resolve(prepare)(payload)
    reply(channel, "ready")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    with suppress(EOFError):
        while True:
            handle = recv_handle(channel)
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                end_with_parent()
                requests = Channel(handle)
                reply(requests, os.getpid())
                while True:
                    requests.send(answer(requests.recv()).encode(errors="replace"))  # as `reply` does
            os.close(handle)
