"""One question to a new process: a function of ours that runs users' code, called there with a time limit."""

import io
import sys
from typing import Any

from workers.errors import BallastError, ConfigError
from workers.isolation.process import LONGEST_PICKLE, LONGEST_QUOTE, Channel, EndedError, Process, reply, resolve


class NoAnswerError(Exception):
    """A process gave no answer; says in words whether it took too long or how it ended."""


def ask(function: str, *arguments: Any, timeout_s: float, setting: str) -> Any:
    """Call `function`, `module:function` of ours, with these arguments in a new process; returns its value.

    The arguments are pickled, the value is JSON. What the process writes to stderr is shown only with a value.
    Raises ConfigError with the text of a BallastError that the function raises. Raises NoAnswerError if there is no
    answer within `timeout_s` seconds, which `setting` limits, or the process ends before.
    """
    errors = io.StringIO()
    process = Process("workers.isolation.asking:answer", errors=errors)
    try:
        process.send((function, arguments))
        found = process.receive(timeout_s, LONGEST_PICKLE)
    except TimeoutError:
        raise NoAnswerError(f"took more than {setting}={timeout_s:g} s") from None
    except EndedError as end:
        lines = errors.getvalue().strip().splitlines()
        last = f": {lines[-1][:LONGEST_QUOTE]}" if lines else ""
        raise NoAnswerError(f"ended its process ({end}{last})") from None
    finally:
        process.end()
    if "failure" in found:
        raise ConfigError(found["failure"])
    sys.stderr.write(errors.getvalue())
    return found["value"]


def answer(channel: Channel) -> None:
    """In the process: answer one question. SystemExit passes: it ends the process, and the other side sees its code."""
    function, arguments = channel.recv()
    try:
        found = {"value": resolve(function)(*arguments)}
    except BallastError as error:
        found = {"failure": str(error)}
    sys.stdout.flush()
    sys.stderr.flush()
    reply(channel, found)
