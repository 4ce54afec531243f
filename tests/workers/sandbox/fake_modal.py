"""A stand-in for Modal's API and for the router of commands of its workers, by the SDK's own gRPC services."""

# ruff: noqa: N802

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from threading import Thread
from typing import Any

from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_pb2
from modal_proto import task_command_router_pb2 as router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from tests.workers.sandbox.hosted_machines import GONE, Machines

SUCCESS = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
BUILDER = "2025.06"


def serve_machines(machines: Machines) -> Iterator[int]:
    """Serve until the generator is closed. Yields the port."""
    import modal

    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()

    api = Api(machines)

    async def start() -> Server:
        server = Server([api, Router(machines)])
        await server.start("127.0.0.1", 0)
        assert server._server is not None
        api.port = server._server.sockets[0].getsockname()[1]
        return server

    async def stop() -> None:
        server.close()
        await server.wait_closed()

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    yield api.port
    modal.Client.from_env().close()  # it is one for the process
    asyncio.run_coroutine_threadsafe(stop(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def make_token() -> str:
    payload = base64.urlsafe_b64encode(
        json.dumps({"exp": time.time() + 3600}).encode()
    ).decode()
    return f"x.{payload}.x"


class Api(ModalClientBase):
    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._images: dict[str, str] = {}
        self.port = 0

    def _check_key(self, stream: Any) -> None:
        if stream.metadata.get("x-modal-token-secret") != self._machines.key:
            raise GRPCError(Status.UNAUTHENTICATED, "Token ID is malformed")

    async def ClientHello(self, stream: Any) -> None:
        await stream.recv_message()
        self._check_key(stream)
        await stream.send_message(
            api_pb2.ClientHelloResponse(image_builder_version=BUILDER)
        )

    async def AuthTokenGet(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.AuthTokenGetResponse(token=make_token()))

    async def EnvironmentGetOrCreate(self, stream: Any) -> None:
        await stream.recv_message()
        settings = api_pb2.EnvironmentSettings(image_builder_version=BUILDER)
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        answer = api_pb2.EnvironmentGetOrCreateResponse(
            environment_id="en-1", metadata=metadata
        )
        await stream.send_message(answer)

    async def AppGetOrCreate(self, stream: Any) -> None:
        await stream.recv_message()
        self._check_key(stream)
        await stream.send_message(api_pb2.AppGetOrCreateResponse(app_id="ap-1"))

    async def ImageGetOrCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        (first, *_) = request.image.dockerfile_commands
        image = f"im-{len(self._images)}"
        self._images[image] = first.removeprefix("FROM ")
        result = SUCCESS
        if GONE in first:
            failure = api_pb2.GenericResult.GENERIC_STATUS_FAILURE
            result = api_pb2.GenericResult(status=failure, exception=f"{GONE}: not found")
        await stream.send_message(
            api_pb2.ImageGetOrCreateResponse(image_id=image, result=result)
        )

    async def SandboxCreateV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        marks = {tag.tag_name: tag.tag_value for tag in request.tags}
        machine = self._machines.add(
            marks, (request, self._images[request.definition.image_id])
        )
        answer = api_pb2.SandboxCreateV2Response(
            sandbox_id=f"sb-{machine.name}V", task_id=machine.name
        )
        await stream.send_message(answer)

    async def SandboxGetCommandRouterAccess(self, stream: Any) -> None:
        await stream.recv_message()
        url = f"http://127.0.0.1:{self.port}"
        await stream.send_message(
            api_pb2.SandboxGetCommandRouterAccessResponse(url=url, jwt=make_token())
        )

    async def SandboxListV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        marks = {tag.tag_name: tag.tag_value for tag in request.tags}
        listed = [] if request.before_timestamp else self._machines.with_marks(marks)
        sandboxes = [
            api_pb2.SandboxInfo(
                id=f"sb-{machine.name}V", created_at=1.0, app_id=request.app_id
            )
            for machine in listed
        ]
        await stream.send_message(api_pb2.SandboxListResponse(sandboxes=sandboxes))

    async def SandboxTagsGetV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        marks = self._machines.machines[name_of(request.sandbox_id)].marks
        tags = [
            api_pb2.SandboxTag(tag_name=name, tag_value=value)
            for name, value in marks.items()
        ]
        await stream.send_message(api_pb2.SandboxTagsGetResponse(tags=tags))

    async def SandboxTerminateV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        self._machines.machines.pop(name_of(request.sandbox_id), None)
        await stream.send_message(api_pb2.SandboxTerminateResponse())


class Router(TaskCommandRouterBase):
    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def TaskExecStart(self, stream: Any) -> None:
        request = await stream.recv_message()
        machine = self._machines.machines.get(request.task_id)
        if machine is None:
            raise GRPCError(Status.NOT_FOUND, f"no task {request.task_id}")
        self._processes[request.exec_id] = await asyncio.create_subprocess_exec(
            *request.command_args,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=machine.folder,
        )
        await stream.send_message(router_pb2.TaskExecStartResponse())

    async def TaskExecStdinWrite(self, stream: Any) -> None:
        request = await stream.recv_message()
        stdin = self._processes[request.exec_id].stdin
        assert stdin is not None
        stdin.write(request.data)
        if request.eof:
            stdin.close()
        await stream.send_message(router_pb2.TaskExecStdinWriteResponse())

    async def TaskExecStdioRead(self, stream: Any) -> None:
        request = await stream.recv_message()
        process = self._processes[request.exec_id]
        errors = (
            request.file_descriptor == router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR
        )
        pipe = process.stderr if errors else process.stdout
        assert pipe is not None
        while part := await pipe.read(65_536):
            await stream.send_message(router_pb2.TaskExecStdioReadResponse(data=part))

    async def TaskExecWait(self, stream: Any) -> None:
        request = await stream.recv_message()
        code = await self._processes[request.exec_id].wait()
        answer = router_pb2.TaskExecWaitResponse(code=code)
        if code < 0:
            answer = router_pb2.TaskExecWaitResponse(signal=-code)
        await stream.send_message(answer)


def name_of(sandbox_id: str) -> str:
    return sandbox_id.removeprefix("sb-").removesuffix("V")


Api.__abstractmethods__ = frozenset()  # what the tests do not call stays without an answer
Router.__abstractmethods__ = frozenset()
