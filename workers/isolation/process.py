"""Process: a Python process that calls one function of ours with its end of a connection.

process = Process("workers.reward_process:serve")     in the process: serve(channel)
process.send(object)             --pickle-->          channel.recv()
process.receive(timeout_s)       <--JSON---           reply(channel, answer)
sys.stdout, sys.stderr           <--lines, cut---     print(...)
process.end()                                         killed, with all that it has started

A message begins with a secret of the two ends: what users' code writes to a descriptor that it found is no message.
"""

import ctypes
import fcntl
import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from io import BufferedReader
from threading import Thread
from typing import Any, TextIO

PR_SET_PDEATHSIG = 1  # linux/prctl.h
EXIT_SECONDS = 1.0  # for a process that has closed its connection to exit, and so to have an exit code
START_SECONDS = 60.0  # for a process to start and read what it is sent
SECRET = 8  # bytes
HEADER = SECRET + 8  # bytes: the secret and the size of what follows
LONGEST_ANSWER = 2**24  # bytes, of a sample's score or an environment's turn
LONGEST_PICKLE = 2**30  # bytes, of a function with what it holds, or of an epoch's order
LONGEST_LINE = 2**16  # bytes that are shown of users' code at a time
SHOWN_BYTES, SHOWN_SECONDS = 10**6, 60.0  # what users' code may print, and within what time
LONGEST_QUOTE = 200  # characters of an error's text, or of the last line that a process wrote
FIRST_DESCRIPTOR = 500  # of a channel in its process, beyond those that careless code writes to or closes

RAISED = (Exception, KeyboardInterrupt, SystemExit)
"""Everything that users' code may raise: in its own process KeyboardInterrupt and SystemExit are nobody else's."""


class EndedError(Exception):
    """A process ended before it answered; the text says how: `exit code 7`, `killed by SIGKILL`."""


class Process:
    """A new process of `target`, and our end of the connection to it."""

    def __init__(self, target: str, *, errors: TextIO | None = None) -> None:
        """target: `module:function`, ours, called with the other end. errors: where its stderr goes; None is ours."""
        self.socket, theirs = socket.socketpair()
        self._secret = os.urandom(SECRET)
        self.socket.sendall(self._secret)
        with theirs:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            environment["PYTHONUNBUFFERED"] = (
                "1"  # what users' code prints is seen at once, also if the process is killed
            )
            self._process = subprocess.Popen(
                [sys.executable, "-m", "workers.isolation", target, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        shown = ((self._process.stdout, sys.stdout), (self._process.stderr, errors or sys.stderr))
        self._shown = [Thread(target=_show, args=streams, daemon=True) for streams in shown]
        for thread in self._shown:
            thread.start()
        self._end = ""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def send(self, value: Any) -> None:
        """Send an object, pickled. Raises EndedError if the process has ended, or does not read it."""
        try:
            self.socket.settimeout(START_SECONDS)
            self.socket.sendall(framed(self._secret, pickle.dumps(value)))
        except OSError:
            raise EndedError(self.end(EXIT_SECONDS)) from None

    def receive(self, timeout_s: float, longest: int = LONGEST_ANSWER) -> Any:
        """The next answer. Raises TimeoutError if it is not whole within `timeout_s`, EndedError if the process ends.

        A process whose answer has more than `longest` bytes, or is not ours, is killed.
        """
        deadline = time.monotonic() + timeout_s
        try:
            size = answer_size(self._secret, read_exactly(self.socket, HEADER, deadline), longest)
            return json.loads(read_exactly(self.socket, size, deadline))
        except (EOFError, ConnectionError):
            raise EndedError(self.end(EXIT_SECONDS)) from None
        except ValueError as error:
            self.end()
            raise EndedError(f"killed: {error}") from None

    def end(self, exit_s: float = 0.0) -> str:
        """Kill the process and all that it has started, unless it exits within `exit_s`; returns how it ended."""
        if not self._end:
            self.socket.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(exit_s)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
            for thread in self._shown:
                thread.join(EXIT_SECONDS)  # longer only if a process that has left the group holds the stream
            self._end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return self._end


def _show(stream: BufferedReader, shown: TextIO) -> None:
    """Pass lines on, but not more than SHOWN_BYTES within SHOWN_SECONDS."""
    room, until = 0, 0.0
    with stream:
        # What is dropped need not be split into lines, which would hold the process up.
        while line := stream.readline(LONGEST_LINE) if room >= 0 else stream.read1(LONGEST_LINE):
            if time.monotonic() > until:
                room, until = SHOWN_BYTES, time.monotonic() + SHOWN_SECONDS
            before, room = room, room - len(line)
            text = line.decode(errors="replace")
            if room < 0:
                text = f"\n[more than {SHOWN_BYTES:,} bytes in {SHOWN_SECONDS:g} s: what follows is not shown]\n"
            if before >= 0:
                with suppress(OSError, ValueError):  # a stream that is full or closed: the process must not wait for it
                    shown.write(text)
                    shown.flush()


def read_exactly(stream: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """The next bytes. Raises TimeoutError if they are not there by `deadline`, EOFError at the end."""
    found = bytearray()
    while len(found) < size:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        stream.settimeout(left)
        part = stream.recv(min(size - len(found), 2**20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def framed(secret: bytes, payload: bytes) -> bytes:
    """A message of one end of a channel to the other."""
    return secret + len(payload).to_bytes(HEADER - SECRET) + payload


def answer_size(secret: bytes, header: bytes, longest: int = LONGEST_ANSWER) -> int:
    """Bytes of the answer that follows. Raises ValueError for one that is not ours, or too long."""
    if header[:SECRET] != secret:
        raise ValueError("it wrote to our connection")
    size = int.from_bytes(header[SECRET:])
    if size > longest:
        raise ValueError(f"its answer has more than {longest:,} bytes")
    return size


def named(error: BaseException) -> str:
    """An error of users' code in one short line: its type and the beginning of its text, if that can be read."""
    try:
        text = next(iter(str(error).splitlines()), "").rstrip(".")
    except Exception:
        text = ""
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= LONGEST_QUOTE else f"{line[:LONGEST_QUOTE]}..."


# What follows runs in the process.


class Channel:
    """The process's end. No process that it starts or forks has it."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: of the socket; it is closed."""
        self._socket = socket.socket(fileno=fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR))
        os.close(descriptor)
        os.register_at_fork(after_in_child=lambda: os.close(self._socket.detach()))
        self._secret = read_exactly(self._socket, SECRET)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def recv(self) -> Any:
        """The next object that is sent. Raises EOFError when the other side is gone."""
        size = int.from_bytes(read_exactly(self._socket, HEADER)[SECRET:])
        return pickle.loads(read_exactly(self._socket, size))

    def send(self, answer: bytes) -> None:
        """Send JSON."""
        self._socket.sendall(framed(self._secret, answer))


def main() -> None:
    """Call the target that the command line names. Users' code finds no arguments of ours there."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, target = int(sys.argv.pop()), sys.argv.pop()
    resolve(target)(Channel(descriptor))


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def resolve(target: str) -> Any:
    """The function `module:function`, of ours."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def reply(channel: Channel, answer: Any) -> None:
    """Send an answer, as JSON, with `?` for halves of characters, which no file or terminal takes."""
    channel.send(json.dumps(answer, ensure_ascii=False).encode(errors="replace"))
