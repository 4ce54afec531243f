"""Users' code in a process of its own, which may raise, hang or die without harm to ours.

start_isolated(module) --socket--> `python -m module FD`: enter_isolation, then users' code     served for long
ask(module, question) ---question--> answering(respond) --one answer--> and the process is ended      asked once
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, Any

PR_SET_PDEATHSIG = 1
LONGEST_QUOTE = 200  # characters of what a process wrote last

Answer = dict[str, Any]
"""What JSON can hold: nothing of the user's is unpickled beside ours."""


class NoAnswerError(Exception):
    """A process gave no answer; says in words whether it took too long or how it ended."""


def start_isolated(
    module: str, *, errors: IO[bytes] | int | None = None, own_session: bool = False
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """`python -m module FD`, with this process's import path; FD is its end of a socket, ours is returned.

    errors: where its stderr goes; None is ours. own_session: whether it leads a session, so that `end_session` also
    ends what it has started.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            start_new_session=own_session,
        )
    return process, ours


def enter_isolation() -> int:
    """The file descriptor of the socket's other end; to be called first in a process of `start_isolated`.

    The process then ends with its parent, leaves Ctrl-C to it, and shows users' code no arguments of ours.
    """
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return int(sys.argv.pop())


def end_with_parent() -> None:
    """Let the kernel end this process when the thread that started it ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """The exit code of a process that has ended, in words."""
    code = process.returncode
    return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def named(error: BaseException) -> str:
    """An error of users' code in one line: its type and the first line of its text."""
    text = next(iter(str(error).splitlines()), "").rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def ask(
    module: str, question: Mapping[str, Any], payload: bytes = b"", *, timeout_s: float, setting: str
) -> tuple[Answer, bytes]:
    """What `answering` of a new process of `module` answers to a question and bytes beside it.

    What the process writes to stderr is shown only with an answer. Raises NoAnswerError if there is none within
    `timeout_s` seconds, which `setting` limits, or the process ends before.
    """
    with tempfile.TemporaryFile() as errors:
        process, ours = start_isolated(module, errors=errors, own_session=True)
        try:
            with Connection(ours.detach()) as connection:
                connection.send_bytes(json.dumps(question).encode())
                connection.send_bytes(payload)
                if not connection.poll(timeout_s):
                    raise NoAnswerError(f"took more than {setting}={timeout_s:g} s")
                answer, packed = json.loads(connection.recv_bytes()), connection.recv_bytes()
        except (EOFError, ConnectionError):
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)  # one that ends by itself has an exit code to tell
            raise NoAnswerError(f"ended its process ({how_it_ended(process)}{_last_line(errors)})") from None
        finally:
            _end_session(process)
        if "failure" not in answer:
            errors.seek(0)
            sys.stderr.write(errors.read().decode(errors="replace"))
        return answer, packed


def answering(respond: Callable[[Answer, bytes], tuple[Answer, bytes]]) -> None:
    """In the process: take the question, give the answer of `respond`."""
    with Connection(enter_isolation()) as connection:
        question, payload = json.loads(connection.recv_bytes()), connection.recv_bytes()
        answer, packed = respond(question, payload)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(json.dumps(answer).encode())
        connection.send_bytes(packed)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:LONGEST_QUOTE]}" if lines else ""
