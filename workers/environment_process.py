"""Processes of their own for users' environments: one that raises, hangs or dies costs its episode, not the engine.

    EnvironmentPool --fork, please--> source process, which has imported the user's class once
          |                                  | fork
          +--reset, step: one episode at a time--> process --JSON--> Observation
                                                     |
                    ended well: takes another episode; hung: killed; dead: forgotten

Forked, because an episode each needs hundreds of them: a fork takes milliseconds and shares what the class imports.
What comes back is JSON, so that nothing of the user's is unpickled beside the engine.
"""

import asyncio
import inspect
import json
import os
import pickle
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import cloudpickle

from workers.environment import Observation, Text, encode_observation, encode_opening
from workers.errors import BallastError, EpisodeError
from workers.isolation import end_with_parent, enter_isolation, named, start_isolated

START_SECONDS = 60.0
LONGEST_ANSWER = 2**26  # bytes of one answer
READY = b"ready\n"


class Played(Protocol):
    """An environment as an episode sees it, wherever it runs."""

    async def reset(self, record: dict[str, Any]) -> Text:
        """Raises EpisodeError."""

    async def step(self, response: str) -> Observation:
        """Raises EpisodeError."""


@dataclass
class _Process:
    """A forked process, by its pidfd: a number of its own, which no later process can have."""

    handle: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        os.close(self.handle)
        self.writer.close()


class RemoteEnvironment:
    """The environment of one episode, in a process of the pool."""

    def __init__(self, process: _Process, timeout_s: float) -> None:
        self._process, self._timeout_s = process, timeout_s

    async def reset(self, record: dict[str, Any]) -> Text:
        """What is added to the record's prompt. Raises EpisodeError."""
        opening: Text = await self._call("reset", record)
        return opening

    async def step(self, response: str) -> Observation:
        """The answer to a turn. Raises EpisodeError."""
        return Observation(**await self._call("step", response))

    async def _call(self, method: str, argument: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                self._process.writer.write(_framed(pickle.dumps((method, argument))))
                await self._process.writer.drain()
                line = await self._process.reader.readline()
        except TimeoutError:
            raise EpisodeError(f"{method} took more than reward.timeout_s={self._timeout_s:g} s") from None
        except (OSError, ValueError) as error:  # ValueError: an answer longer than the reader takes
            raise EpisodeError(f"{method} got no answer: {error}") from None
        if not line:
            raise EpisodeError(f"{method} ended its process")
        answer = json.loads(line)
        if "failure" in answer:
            raise EpisodeError(answer["failure"])
        return answer["value"]


class EnvironmentPool:
    """Processes that play episodes of one environment class; as many as are played at a time."""

    def __init__(self, environment: bytes, timeout_s: float, *, silent: bool = False) -> None:
        """environment: the pickled class, which only its processes unpickle. timeout_s: what one call may take. silent:
        whether what they write to stderr is thrown away."""
        self._environment, self._timeout_s = environment, timeout_s
        self._errors = subprocess.DEVNULL if silent else None
        self._source: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._idle: list[_Process] = []

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[RemoteEnvironment]:
        """An environment in a process that plays nothing else meanwhile.

        Raises EpisodeError if none can be started. A process whose episode failed is not used again.
        """
        process = self._take_idle() or await self._fork()
        try:
            yield RemoteEnvironment(process, self._timeout_s)
        except BaseException:
            process.kill()
            raise
        self._idle.append(process)

    def _take_idle(self) -> _Process | None:
        while self._idle:
            process = self._idle.pop()
            if not process.reader.at_eof():
                return process
            process.kill()
        return None

    async def _fork(self) -> _Process:
        async with self._starting:
            control = await asyncio.to_thread(self._living_source)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(control, [b"f"], [theirs.fileno()])
            reader, writer = await asyncio.open_connection(sock=ours, limit=LONGEST_ANSWER)
            async with asyncio.timeout(START_SECONDS):
                pid = int(await reader.readline())
            return _Process(os.pidfd_open(pid), reader, writer)
        except (OSError, ValueError) as error:  # TimeoutError is an OSError; ValueError: the process ended at once
            ours.close()
            raise EpisodeError(f"no process for the environment could be started: {error}") from None

    def _living_source(self) -> socket.socket:
        """The socket on which the source process takes requests; it is started if there is none, or it died."""
        if self._control is not None and self._source is not None and self._source.poll() is None:
            return self._control
        self._end_source()
        self._source, self._control = start_isolated("workers.environment_process", errors=self._errors)
        ours = self._control
        ours.settimeout(START_SECONDS)
        try:
            ours.sendall(_framed(self._environment))
            ready = ours.recv(len(READY))
        except OSError:
            ready = b""
        if ready != READY:
            self._end_source()
            raise EpisodeError("the class of rollout.environment could not be imported in its process")
        return ours

    async def stop(self) -> None:
        """End all processes; another episode starts them again."""
        idle, self._idle = self._idle, []
        for process in idle:
            process.kill()
        await asyncio.to_thread(self._end_source)

    def _end_source(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._source is not None:
            self._source.kill()  # what it has forked dies with it
            self._source.wait()
        self._control = self._source = None


def _framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(8) + payload


def _read_frame(stream: BinaryIO) -> bytes:
    """The next payload, empty when the other side is gone."""
    return stream.read(int.from_bytes(stream.read(8)))


def fork_on_request(control: socket.socket) -> None:
    """Unpickle the class, then fork a process for every socket that comes, until the other side is gone."""
    with control.makefile("rb") as stream:  # nothing follows the class until we are ready
        environment = cloudpickle.loads(_read_frame(stream))
    control.sendall(READY)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        message, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end_with_parent()
            control.close()
            with socket.socket(fileno=sockets[0]) as connection:
                play(environment, connection)
            return
        os.close(sockets[0])


def play(environment_class: type, connection: socket.socket) -> None:
    """Answer `reset` and `step` until the other side is gone; every `reset` makes a new environment."""
    loop = asyncio.new_event_loop()
    environment = None
    connection.sendall(f"{os.getpid()}\n".encode())
    with connection.makefile("rb") as stream:
        while frame := _read_frame(stream):
            method, argument = pickle.loads(frame)
            try:
                if method == "reset":
                    environment = environment_class()
                encode = encode_opening if method == "reset" else encode_observation
                value = encode(loop.run_until_complete(_result(getattr(environment, method)(argument))))
                answer = f'{{"value": {value}}}'
            except BallastError as error:
                answer = json.dumps({"failure": str(error)})
            except (Exception, KeyboardInterrupt, SystemExit) as error:  # of theirs: Ctrl-C is left to the parent
                answer = json.dumps({"failure": f"{method} raised {named(error)}"})
            connection.sendall(answer.encode() + b"\n")


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def main() -> None:
    """Serve the control socket whose file descriptor is the only argument."""
    fork_on_request(socket.socket(fileno=enter_isolation()))


if __name__ == "__main__":
    # By its importable name: what is pickled here must be found under the same name on the other side.
    from workers.environment_process import main as run

    run()
