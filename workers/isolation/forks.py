"""ForkPool: processes of one user's object, forked from a process that has imported it once.

    ForkPool --file descriptor of a socket--> source process: answer = prepare(payload)
        |                                         | fork
        +--request, pickled--> answer(request) in a process of its own --a line of JSON--> ForkPool
                                  |
              used again; killed if it is not given back; forgotten if it is dead

A fork takes milliseconds and shares the memory of imports, so that hundreds can run side by side.
"""

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, BinaryIO

from workers.isolation.process import EndedError, Process, end_with_parent, reply, resolve

START_SECONDS = 60.0
LONGEST_ANSWER = 2**26  # bytes


@dataclass
class Fork:
    """A forked process. handle: its pidfd, which no later process can have."""

    pid: int
    handle: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def call(self, request: Any, timeout_s: float) -> Any:
        """The answer to a request. Raises TimeoutError after `timeout_s`, EOFError if the process ends before, OSError
        or ValueError if no answer can be read."""
        async with asyncio.timeout(timeout_s):
            self.writer.write(_framed(pickle.dumps(request)))
            await self.writer.drain()
            line = await self.reader.readline()
        if not line:
            raise EOFError
        return json.loads(line)

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
        """prepare: `module:function` of ours, which makes of the payload the function that answers requests with a line
        of JSON. silent: whether what the processes write to stderr is thrown away."""
        self._prepare, self._payload = prepare, payload
        self._errors = subprocess.DEVNULL if silent else None
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
    try:
        with theirs:
            send_handle(source.connection, theirs.fileno(), None)
        reader, writer = await asyncio.open_connection(sock=ours, limit=LONGEST_ANSWER)
        async with asyncio.timeout(START_SECONDS):
            pid = int(await reader.readline())
        return Fork(pid, os.pidfd_open(pid), reader, writer)
    except BaseException:
        ours.close()
        raise


def _framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(8) + payload


# The functions below run in the processes.


def fork_on_request(connection: Connection) -> None:
    """Prepare the payload, then fork a process for every socket that comes, until the other side is gone."""
    prepare, payload = connection.recv()
    answer = resolve(prepare)(payload)
    reply(connection, "ready")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    with suppress(EOFError):
        while True:
            handle = recv_handle(connection)
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                end_with_parent()
                connection.close()
                with socket.socket(fileno=handle) as requests:
                    _serve(requests, answer)
                return
            os.close(handle)


def _serve(requests: socket.socket, answer: Callable[[Any], str]) -> None:
    """Say the process id, then answer requests until the other side is gone."""
    requests.sendall(f"{os.getpid()}\n".encode())
    with requests.makefile("rb") as stream:
        while frame := _read_frame(stream):
            requests.sendall(answer(pickle.loads(frame)).encode() + b"\n")


def _read_frame(stream: BinaryIO) -> bytes:
    """The next payload, empty when the other side is gone."""
    return stream.read(int.from_bytes(stream.read(8)))
