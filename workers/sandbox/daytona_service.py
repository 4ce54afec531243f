"""Daytona: sandboxes of an image, with cores and GiB in whole numbers."""

import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from workers.sandbox.hosted import IDLE_SECONDS, START_SECONDS, Service
from workers.sandbox.protocol import CommandResult, SandboxLimits
from workers.sandbox.text_transport import NO_INPUT, decode_result, encode_command


class DaytonaService(Service):
    name = "daytona"
    needed = "IMAGE"
    variables = ("DAYTONA_API_KEY",)

    def create(self, image: str, limits: SandboxLimits, marks: Mapping[str, str]) -> Any:
        from daytona import CreateSandboxFromImageParams, Resources

        resources = Resources(
            cpu=math.ceil(limits.cpus),
            memory=math.ceil(limits.memory_mib / 1024),
            disk=math.ceil(limits.disk_mib / 1024),
        )
        parameters = CreateSandboxFromImageParams(
            image=image,
            resources=resources,
            labels=dict(marks),
            network_block_all=not limits.network,
            auto_stop_interval=IDLE_SECONDS // 60,
            auto_delete_interval=0,  # as soon as it stops
        )
        return make_client().create(parameters, timeout=START_SECONDS)

    def execute(
        self,
        sandbox: Any,
        arguments: Sequence[str],
        stdin: bytes,
        seconds: float,
        longest: int,
    ) -> CommandResult:
        input_file = NO_INPUT
        if stdin:
            input_file = f"/tmp/{uuid.uuid4().hex}"
            sandbox.fs.upload_file(stdin, input_file)
        line = encode_command(arguments, input_file, longest)
        answer = sandbox.process.exec(line, timeout=math.ceil(seconds))
        return decode_result(answer.result)

    def remove(self, sandbox: Any) -> None:
        from daytona import DaytonaNotFoundError

        with suppress(DaytonaNotFoundError):
            sandbox.delete()

    def find(self, marks: Mapping[str, str]) -> Iterable[tuple[Mapping[str, str], Any]]:
        from daytona import ListSandboxesQuery

        for sandbox in make_client().list(ListSandboxesQuery(labels=dict(marks))):
            yield sandbox.labels, sandbox


@cache
def make_client() -> Any:
    """Return the client of this process, which has a thread and a pool of connections."""
    from daytona import Daytona

    return Daytona()
