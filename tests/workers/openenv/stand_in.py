"""A server that speaks OpenEnv's protocol: sessions that count, by a typed action or by tools."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from threading import Thread
from typing import Any

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.sync.server import ServerConnection, serve

CLEANING_SECONDS = 0.1
TYPED = {
    "title": "CountAction",
    "description": "Count on.",
    "type": "object",
    "properties": {"by": {"type": "integer"}, "metadata": {"type": "object"}},
    "required": ["by"],
}
CALL = {
    "title": "CallToolAction",
    "properties": {"tool_name": {"type": "string"}, "metadata": {}},
}
TOOL = {
    "name": "count",
    "description": "Count on.",
    "input_schema": {"type": "object", "properties": {}},
}


class StandIn:
    """Rewards each number it is given, and is done above ten. most: sessions at once."""

    def __init__(self, *, typed: bool, most: int = 64) -> None:
        self.pages: dict[str, Any] = {
            "/schema": {"action": TYPED if typed else CALL},
            "/metadata": {"name": "counting", "description": "Count above ten."},
        }
        self.typed = typed
        self.most = most
        self.open_sessions = 0
        self.seeds: list[Any] = []
        self.closed_by_message = 0
        self.found_nobody = 0

    def answer_page(
        self, connection: ServerConnection, request: Request
    ) -> Response | None:
        if request.path == "/ws":
            return None
        page = self.pages.get(request.path)
        status = HTTPStatus.NOT_FOUND if page is None else HTTPStatus.OK
        return Response(status, status.phrase, Headers(), json.dumps(page).encode())

    def play(self, connection: ServerConnection) -> None:
        if self.open_sessions >= self.most:
            connection.send(_error("CAPACITY_REACHED", "all sessions are in use"))
            return
        self.open_sessions += 1
        total = 0
        try:
            for line in connection:
                message = json.loads(line)
                data = message.get("data", {})
                match message["type"]:
                    case "close":
                        self.closed_by_message += 1
                        time.sleep(CLEANING_SECONDS)
                        self.found_nobody += connection.state is not State.OPEN
                        return
                    case "reset":
                        self.seeds.append(data.get("seed"))
                        total = data.get("from", 0)
                        reward = data.get("reward")
                        connection.send(_observe({"total": total, "metadata": {}}, reward))
                    case "state":
                        connection.send(json.dumps({"type": "state", "data": {}}))
                    case "step" if data.get("type") == "list_tools":
                        connection.send(_observe({"tools": [TOOL]}))
                    case "step":
                        total = self.step(connection, data, total)
        except ConnectionClosed:
            pass
        finally:
            self.open_sessions -= 1

    def step(self, connection: ServerConnection, data: dict[str, Any], total: int) -> int:
        fields = data if self.typed else data.get("arguments", {})
        match fields.get("by"):
            case int() as number:
                total += number
                shown = (
                    {"total": total}
                    if self.typed
                    else {"tool_name": "count", "result": total}
                )
                connection.send(_observe(shown, reward=float(number), done=total > 10))
            case "crash":
                connection.socket.shutdown(socket.SHUT_RDWR)
            case "raise":
                connection.send(_error("EXECUTION_ERROR", "division by zero"))
            case "hang":
                pass
            case "nan":
                connection.send(_observe({"total": 0}, reward=float("nan")))
            case "text":
                connection.send("no JSON")
            case _:
                errors = [{"loc": ["by"], "msg": "should be a number"}]
                connection.send(
                    _error("VALIDATION_ERROR", "Invalid message", errors=errors)
                )
        return total


def _observe(
    fields: dict[str, Any], reward: float | None = None, *, done: bool = False
) -> str:
    return json.dumps(
        {
            "type": "observation",
            "data": {"observation": fields, "reward": reward, "done": done},
        }
    )


def _error(code: str, message: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": message, **more}})


@contextmanager
def serving(stand_in: StandIn) -> Iterator[str]:
    """Serve on a free port, and yield the URL."""
    with serve(
        stand_in.play, "127.0.0.1", 0, process_request=stand_in.answer_page
    ) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()
