"""A stand-in for E2B's API and for the program that answers in its sandboxes, by the SDK's own types."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, unquote

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.api.client.models.listed_sandbox import ListedSandbox
from e2b.api.client.models.sandbox import Sandbox
from e2b.api.client.models.sandbox_state import SandboxState
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from tests.workers.sandbox.hosted_machines import (
    GONE,
    Api,
    Machines,
    for_known,
    refusal,
    serve,
)

VERSION = "0.6.4"
HEADER = "e2b-sandbox-id"


def serve_machines(machines: Machines) -> Iterator[int]:
    """Serve until the generator is closed. Yields the port."""
    api = FakeApi(machines)
    processes = process_connect.ProcessASGIApplication(Processes(machines))
    routes = [
        Route("/v2/sandboxes", api.create, methods=["POST"]),
        Route("/v2/sandboxes", api.list_sandboxes, methods=["GET"]),
        Route("/sandboxes/{name}", api.delete, methods=["DELETE"]),
        Route("/sandboxes/{name}/timeout", api.set_timeout, methods=["POST"]),
        Route("/files", api.write, methods=["POST"]),
        Route("/health", api.health),
        Mount("/", processes),
    ]
    return serve(Starlette(routes=routes))


class FakeApi(Api):
    @for_known
    async def create(self, request: Request) -> Response:
        asked = await request.json()
        if asked["templateID"] == GONE:
            return refusal(404, f"template '{GONE}' not found")
        name = self.machines.add(asked["metadata"], asked).name
        sandbox = Sandbox(
            template_id=GONE, sandbox_id=name, client_id="1", envd_version=VERSION
        )
        return JSONResponse(sandbox.to_dict(), 201)

    @for_known
    async def list_sandboxes(self, request: Request) -> Response:
        marks = {
            unquote(name): unquote(value)
            for name, value in parse_qsl(request.query_params["metadata"])
        }
        now = datetime.now(UTC)
        sizes = {"cpu_count": 2, "memory_mb": 512, "disk_size_mb": 1024}
        times = {"started_at": now, "end_at": now, "state": SandboxState.RUNNING}
        sandboxes = [
            ListedSandbox(
                template_id="t",
                sandbox_id=machine.name,
                client_id="1",
                envd_version=VERSION,
                metadata=machine.marks,
                **sizes,
                **times,
            ).to_dict()
            for machine in self.machines.with_marks(marks)
        ]
        return JSONResponse(sandboxes)

    @for_known
    async def delete(self, request: Request) -> Response:
        del self.machines.machines[request.path_params["name"]]
        return Response(status_code=204)

    @for_known
    async def set_timeout(self, request: Request) -> Response:
        asked = await request.json()
        self.machines.machines[request.path_params["name"]].asked |= asked
        return Response(status_code=204)

    async def write(self, request: Request) -> Response:
        path = request.query_params["path"]
        async with request.form() as form:
            (file,) = form.values()
            content = await file.read()  # type: ignore[union-attr]
        machine = self.machines.machines[request.headers[HEADER]]
        (machine.folder / path).write_bytes(content)
        return JSONResponse([{"name": path, "path": path, "type": "file"}])

    async def health(self, request: Request) -> Response:
        known = request.headers[HEADER] in self.machines.machines
        return Response(status_code=204 if known else 502)


class Processes(process_connect.Process):
    def __init__(self, machines: Machines) -> None:
        self._machines = machines

    async def start(
        self, request: process_pb.StartRequest, ctx: Any
    ) -> AsyncIterator[process_pb.StartResponse]:
        machine = self._machines.machines.get(ctx.request_headers.get(HEADER, ""))
        if machine is None:
            raise ConnectError(Code.UNAVAILABLE, "the sandbox was not found")
        yield _event("start", process_pb.ProcessEvent.StartEvent(pid=7))
        config = request.process
        assert config is not None
        command = [config.cmd, *config.args]
        code, output = await asyncio.to_thread(machine.run, command, dict(config.envs))
        for start in range(0, len(output), 30_000):
            part = Oneof("stdout", output[start : start + 30_000])
            yield _event("data", process_pb.ProcessEvent.DataEvent(output=part))
        yield _event("end", process_pb.ProcessEvent.EndEvent(exit_code=code, exited=True))


def _event(kind: Any, event: Any) -> process_pb.StartResponse:
    return process_pb.StartResponse(event=process_pb.ProcessEvent(event=Oneof(kind, event)))
