"""E2B: sandboxes of a template, which has their cores, memory and disk."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workers.sandbox.hosted import IDLE_SECONDS, START_SECONDS, Service
from workers.sandbox.protocol import CommandResult, SandboxLimits
from workers.sandbox.text_transport import NO_INPUT, decode_result, encode_command


class E2bService(Service):
    name = "e2b"
    needed = "TEMPLATE"
    variables = ("E2B_API_KEY",)

    def create(self, image: str, limits: SandboxLimits, marks: Mapping[str, str]) -> Any:
        from e2b import Sandbox

        return Sandbox.create(
            template=image,
            timeout=IDLE_SECONDS,
            metadata=dict(marks),
            allow_internet_access=limits.network,
            request_timeout=START_SECONDS,
        )

    def execute(
        self,
        sandbox: Any,
        arguments: Sequence[str],
        stdin: bytes,
        seconds: float,
        longest: int,
    ) -> CommandResult:
        # Its life is counted from here anew.
        sandbox.set_timeout(int(seconds) + IDLE_SECONDS)
        input_file = NO_INPUT
        if stdin:
            input_file = f"/tmp/{uuid.uuid4().hex}"
            sandbox.files.write(input_file, stdin)
        line = encode_command(arguments, input_file, longest)
        return decode_result(sandbox.commands.run(line, timeout=seconds).stdout)

    def remove(self, sandbox: Any) -> None:
        sandbox.kill()

    def find(self, marks: Mapping[str, str]) -> Iterable[tuple[Mapping[str, str], Any]]:
        from e2b import Sandbox, SandboxQuery

        pages = Sandbox.list(query=SandboxQuery(metadata=dict(marks)))
        while pages.has_next:
            for information in pages.next_items():
                yield information.metadata, _Listed(information.sandbox_id)


class _Listed:
    """A sandbox of a list. Connecting to it would prolong its life."""

    def __init__(self, number: str) -> None:
        self._number = number

    def kill(self) -> None:
        from e2b import Sandbox

        Sandbox.kill(self._number)
