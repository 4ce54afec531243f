"""A stand-in for Daytona's API and for the program that answers in its sandboxes."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.workers.sandbox.hosted_machines import (
    GONE,
    Api,
    Machine,
    Machines,
    for_known,
    refusal,
    serve,
)


def serve_machines(machines: Machines) -> Iterator[int]:
    """Serve until the generator is closed. Yields the port."""
    from workers.sandbox.daytona_service import make_client

    make_client.cache_clear()  # it is one for the process
    api = FakeApi(machines)
    routes = [
        Route("/sandbox", api.create, methods=["POST"]),
        Route("/sandbox", api.list_sandboxes, methods=["GET"]),
        Route("/sandbox/{name}", api.delete, methods=["DELETE"]),
        Route("/toolbox/{name}/process/execute", api.execute, methods=["POST"]),
        Route("/toolbox/{name}/files/bulk-upload", api.write, methods=["POST"]),
    ]
    return serve(Starlette(routes=routes))


class FakeApi(Api):
    def _describe(self, request: Request, machine: Machine) -> dict[str, Any]:
        asked = machine.asked
        return {
            "id": machine.name,
            "organizationId": "1",
            "name": machine.name,
            "user": "daytona",
            "env": {},
            "labels": machine.marks,
            "public": False,
            "networkBlockAll": asked.get("networkBlockAll", False),
            "kvm": False,
            "target": "eu",
            "cpu": asked.get("cpu", 1),
            "gpu": 0,
            "memory": asked.get("memory", 1),
            "disk": asked.get("disk", 1),
            "state": "started",
            "toolboxProxyUrl": f"{request.base_url}toolbox",
        }

    @for_known
    async def create(self, request: Request) -> Response:
        asked = await request.json()
        if GONE in asked["buildInfo"]["dockerfileContent"]:
            return refusal(400, f"{GONE}: not found")
        machine = self.machines.add(asked["labels"], asked)
        return JSONResponse(self._describe(request, machine))

    @for_known
    async def list_sandboxes(self, request: Request) -> Response:
        marks = json.loads(request.query_params["labels"])
        items = [
            self._describe(request, machine) for machine in self.machines.with_marks(marks)
        ]
        return JSONResponse({"items": items, "nextCursor": None})

    @for_known
    async def delete(self, request: Request) -> Response:
        machine = self.machines.machines.pop(request.path_params["name"])
        return JSONResponse(self._describe(request, machine))

    @for_known
    async def execute(self, request: Request) -> Response:
        asked = await request.json()
        machine = self.machines.machines[request.path_params["name"]]
        code, output = await asyncio.to_thread(
            machine.run, ["bash", "-c", asked["command"]]
        )
        return JSONResponse({"exitCode": code, "result": output.decode()})

    @for_known
    async def write(self, request: Request) -> Response:
        machine = self.machines.machines[request.path_params["name"]]
        async with request.form() as form:
            path = str(form["files[0].path"])
            content = await form["files[0].file"].read()  # type: ignore[union-attr]
        (machine.folder / path).write_bytes(content)
        return JSONResponse({})
