"""One question to a new process: a function of ours that runs users' code, called there with a time limit."""

import sys
import tempfile
from multiprocessing.connection import Connection
from typing import IO, Any

from workers.errors import BallastError, ConfigError
from workers.isolation.process import EndedError, Process, reply, resolve

LONGEST_QUOTE = 200  # characters of the last line that a process wrote


class NoAnswerError(Exception):
    """A process gave no answer; says in words whether it took too long or how it ended."""


def ask(function: str, *arguments: Any, timeout_s: float, setting: str) -> Any:
    """Call `function`, `module:function` of ours, with these arguments in a new process; returns its value.

    The arguments are pickled, the value is JSON. What the process writes to stderr is shown only with a value.
    Raises ConfigError with the text of a BallastError that the function raises. Raises NoAnswerError if there is no
    answer within `timeout_s` seconds, which `setting` limits, or the process ends before.
    """
    with tempfile.TemporaryFile() as errors:
        process = Process("workers.isolation.asking:answer", errors=errors)
        try:
            process.send((function, arguments))
            found = process.receive(timeout_s)
        except TimeoutError:
            raise NoAnswerError(f"took more than {setting}={timeout_s:g} s") from None
        except EndedError as end:
            raise NoAnswerError(f"ended its process ({end}{_last_line(errors)})") from None
        finally:
            process.end()
        if "failure" in found:
            raise ConfigError(found["failure"])
        errors.seek(0)
        sys.stderr.write(errors.read().decode(errors="replace"))
        return found["value"]


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:LONGEST_QUOTE]}" if lines else ""


def answer(connection: Connection) -> None:
    """In the process: answer one question. SystemExit passes: it ends the process, and the other side sees its code."""
    function, arguments = connection.recv()
    try:
        found = {"value": resolve(function)(*arguments)}
    except BallastError as error:
        found = {"failure": str(error)}
    sys.stdout.flush()
    sys.stderr.flush()
    reply(connection, found)
