"""Process: a Python process that calls one function of ours with its end of a connection.

process = Process("workers.reward_process:serve")     in the process: serve(connection)
process.send(object)             --pickle-->          connection.recv()
process.receive(timeout_s)       <--JSON---           reply(connection, answer)
process.end()                                         killed, with all that it has started
"""

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
EXIT_SECONDS = 1.0  # for a process that has closed its connection to exit, and so to have an exit code

RAISED = (Exception, KeyboardInterrupt, SystemExit)
"""Everything that users' code may raise: in its own process KeyboardInterrupt and SystemExit are nobody else's."""


class EndedError(Exception):
    """A process ended before it answered; the text says how: `exit code 7`, `killed by SIGKILL`."""


class Process:
    """A new process of `target`, and our end of the connection to it."""

    def __init__(self, target: str, *, errors: IO[bytes] | int | None = None) -> None:
        """target: `module:function`, ours, called with the other end. errors: where its stderr goes; None is ours."""
        ours, theirs = socket.socketpair()
        with theirs:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            environment["PYTHONUNBUFFERED"] = (
                "1"  # what users' code prints is seen at once, also if the process is killed
            )
            self._process = subprocess.Popen(
                [sys.executable, "-m", "workers.isolation", target, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self._end = ""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def send(self, value: Any) -> None:
        """Send an object, pickled. Raises EndedError if the process has ended."""
        try:
            self.connection.send(value)
        except ConnectionError:
            raise EndedError(self.end(EXIT_SECONDS)) from None

    def receive(self, timeout_s: float) -> Any:
        """The next answer. Raises TimeoutError if there is none within `timeout_s`, EndedError if the process ends."""
        try:
            if not self.connection.poll(timeout_s):
                raise TimeoutError
            return json.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise EndedError(self.end(EXIT_SECONDS)) from None

    def end(self, exit_s: float = 0.0) -> str:
        """Kill the process and all that it has started, unless it exits within `exit_s`; returns how it ended."""
        if not self._end:
            self.connection.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(exit_s)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
            self._end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return self._end


def named(error: BaseException) -> str:
    """An error of users' code in one line: its type and the first line of its text."""
    text = next(iter(str(error).splitlines()), "").rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# The functions below run in the process.


def main() -> None:
    """Call the target that the command line names. Users' code finds no arguments of ours there."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, target = int(sys.argv.pop()), sys.argv.pop()
    with Connection(descriptor) as connection:
        resolve(target)(connection)


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def resolve(target: str) -> Any:
    """The function `module:function`, of ours."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def reply(connection: Connection, answer: Any) -> None:
    """Send an answer, as JSON."""
    connection.send_bytes(json.dumps(answer).encode())
