"""Stand-ins for the services of hosted sandboxes: a server that counts them and runs commands in folders here."""

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

GONE = "tests/gone"
"""An image or template that the service does not have."""


@dataclass
class Machine:
    """asked: the body of the request that made it."""

    name: str
    folder: Path
    marks: dict[str, str]
    asked: Any

    def run(
        self, command: list[str], variables: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        result = subprocess.run(
            command,
            cwd=self.folder,
            env={"PATH": os.defpath, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        code = result.returncode
        return 128 - code if code < 0 else code, result.stdout


@dataclass
class Machines:
    folder: Path
    key: str
    machines: dict[str, Machine] = field(default_factory=dict)

    def add(self, marks: dict[str, str], asked: Any) -> Machine:
        name = f"box{len(list(self.folder.iterdir()))}"
        (self.folder / name).mkdir()
        self.machines[name] = Machine(name, self.folder / name, dict(marks), asked)
        return self.machines[name]

    def count(self) -> int:
        return len(self.machines)

    def with_marks(self, marks: dict[str, str]) -> list[Machine]:
        return [
            machine
            for machine in self.machines.values()
            if marks.items() <= machine.marks.items()
        ]


Handler = Callable[[Any, Request], Awaitable[Response]]


def for_known(handler: Handler) -> Handler:
    """Refuse a wrong key and a machine that is not there."""

    async def answer(self: "Api", request: Request) -> Response:
        key = request.headers.get("x-api-key", request.headers.get("authorization"))
        if (key or "").removeprefix("Bearer ") != self.machines.key:
            return refusal(401, "invalid key")
        if request.path_params.get("name", "") not in {"", *self.machines.machines}:
            return refusal(404, "not found")
        return await handler(self, request)

    return answer


def refusal(status: int, message: str) -> Response:
    return JSONResponse({"statusCode": status, "code": status, "message": message}, status)


class Api:
    def __init__(self, machines: Machines) -> None:
        self.machines = machines


def serve(application: Any) -> Iterator[int]:
    """Serve an ASGI application until the generator is closed. Yields its port."""
    server = uvicorn.Server(
        uvicorn.Config(application, port=0, log_level="error", lifespan="off")
    )
    sockets = [server.config.bind_socket()]
    thread = Thread(target=lambda: asyncio.run(server.serve(sockets)), daemon=True)
    thread.start()
    yield sockets[0].getsockname()[1]
    server.should_exit = True
    server.force_exit = True
    thread.join(10)
