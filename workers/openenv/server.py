"""A server of OpenEnv: what it says of itself by HTTP, and one session of it by WebSocket.

{"type": "reset" | "step" | "close", "data": ...} --> {"type": "observation" | "error", "data": ...}
"""

import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from workers.errors import LONGEST_QUOTE, ConfigError, EpisodeError, quote

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

HTTP_SECONDS = 10.0
CLOSE_SECONDS = 2.0  # for a server to close a session
LONGEST_MESSAGE = 2**24  # bytes
FULL = "CAPACITY_REACHED"
INVALID = "VALIDATION_ERROR"
FIRST_WAIT_SECONDS = 0.1
LONGEST_WAIT_SECONDS = 2.0


class InvalidActionError(Exception):
    """The server does not take an action, whose fields are wrong."""


class FullServerError(Exception):
    """All sessions of the server are in use."""


def check_url(url: str) -> None:
    """Raise ConfigError unless it is a URL of a server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{quote(url)} is not a URL. Start the environment's server and name it, such as "
            "openenv:http://localhost:8000."
        )


def read_page(url: str, path: str, timeout_s: float = HTTP_SECONDS) -> dict[str, Any]:
    """Return what the server says at `path`. Raises ConfigError."""
    check_url(url)
    try:
        with urllib.request.urlopen(
            f"{url.rstrip('/')}{path}", timeout=timeout_s
        ) as answer:
            page = json.load(answer)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ConfigError(
            f"no OpenEnv server answers at {url}{path}: {str(reason).rstrip('.')}. Start it, or correct the "
            "URL."
        ) from None
    if not isinstance(page, dict):
        raise ConfigError(
            f"{url}{path} is not a JSON object. Name the URL of an OpenEnv server."
        )
    return page


class ServerSession:
    """One session, which has an environment of its own in the server. Methods raise EpisodeError."""

    def __init__(self, url: str, explain_end: Callable[[], str] = str) -> None:
        """explain_end: why the server has ended, or "" if that is not known."""
        self._url = url
        self._explain_end = explain_end
        self._connection: ClientConnection | None = None

    def open(self) -> None:
        """Connect, and wait until the server has room for the session."""
        wait = FIRST_WAIT_SECONDS
        while True:
            try:
                return self._open()
            except FullServerError as error:
                if wait == FIRST_WAIT_SECONDS:
                    sys.stderr.write(f"{self._url}: {error}. A sample waits.\n")
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    def _open(self) -> None:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        address = self._url.rstrip("/").replace("http", "ws", 1)
        try:
            self._connection = connect(f"{address}/ws", max_size=LONGEST_MESSAGE)
        except (OSError, WebSocketException) as error:
            reason = self._explain_end() or error
            raise EpisodeError(f"{self._url} does not open a session: {reason}") from None
        self._ask("state")  # a full server answers the first message by that

    def reset(self, options: dict[str, Any]) -> dict[str, Any]:
        return self._ask("reset", options)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        """Raises InvalidActionError too."""
        return self._ask("step", action)

    def close(self) -> None:
        connection = self._connection
        self._connection = None
        if connection is None:
            return
        from websockets.exceptions import WebSocketException

        with suppress(OSError, WebSocketException):
            connection.send(json.dumps({"type": "close"}))
            # The server closes then. To one that finds nobody, that is an error with a traceback.
            connection.recv(timeout=CLOSE_SECONDS)
        connection.close()

    def _ask(self, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed, WebSocketException

        if self._connection is None:
            raise EpisodeError(f"{self._url}: the session is not open")
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            # What the server said before can still be received.
            with suppress(ConnectionClosed):
                self._connection.send(json.dumps(message))
            answer = json.loads(self._connection.recv())
        except (OSError, WebSocketException) as error:
            reason = self._explain_end() or error
            raise EpisodeError(
                f"{self._url} ended the session at {kind}: {reason}"
            ) from None
        except ValueError:
            raise EpisodeError(f"{self._url} answered {kind} with no JSON") from None
        return self._check_answer(kind, answer)

    def _check_answer(self, kind: str, answer: Any) -> dict[str, Any]:
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise EpisodeError(f"{self._url} answered {kind} with {quote(answer)}")
        data: dict[str, Any] = answer["data"]
        if answer.get("type") != "error":
            return data
        problem = _describe_problem(data)
        match data.get("code"):
            case code if code == FULL:
                self.close()
                raise FullServerError(problem)
            case code if code == INVALID and kind == "step":
                raise InvalidActionError(problem)
        raise EpisodeError(f"{self._url} failed at {kind}: {problem}"[:LONGEST_QUOTE])


def _describe_problem(data: dict[str, Any]) -> str:
    """Return the server's message, and which fields are wrong."""
    errors = data.get("errors") or []
    fields = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors]
    message = str(data.get("message", "no message")).rstrip(".")
    return ": ".join([message, ", ".join(fields)]) if fields else message
