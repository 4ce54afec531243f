"""Modal: sandboxes of an image of a registry, in an app of their own."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from workers.sandbox.hosted import IDLE_SECONDS, Service
from workers.sandbox.protocol import CommandResult, SandboxLimits

APP = "ballast-sandboxes"
CHUNK = 2**20


class ModalService(Service):
    name = "modal"
    needed = "IMAGE"
    variables = ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET")

    def has_key(self) -> bool:
        file = Path(os.environ.get("MODAL_CONFIG_PATH", "~/.modal.toml")).expanduser()
        return super().has_key() or file.is_file()  # `modal token set` writes it

    def create(self, image: str, limits: SandboxLimits, marks: Mapping[str, str]) -> Any:
        import modal

        return modal.Sandbox.create(
            app=modal.App.lookup(APP, create_if_missing=True),
            image=modal.Image.from_registry(image),
            timeout=int(limits.lifetime_s),
            idle_timeout=IDLE_SECONDS,
            cpu=(limits.cpus, limits.cpus),  # requested, and at most
            memory=(limits.memory_mib, limits.memory_mib),
            block_network=not limits.network,
            tags=dict(marks),
        )

    def execute(
        self,
        sandbox: Any,
        arguments: Sequence[str],
        stdin: bytes,
        seconds: float,
        longest: int,
    ) -> CommandResult:
        process = sandbox.exec(*arguments, timeout=math.ceil(seconds), text=False)
        sender = Thread(target=_send, args=(process.stdin, stdin), daemon=True)
        sender.start()
        output = bytearray()
        total = 0
        for part in process.stdout:
            total += len(part)
            output += part[: longest - len(output)]
        errors = process.stderr.read()
        total += len(errors)
        output += errors[: longest - len(output)]
        code = process.wait()
        if code == -1:
            raise TimeoutError(f"it did not answer in {seconds:g} s")
        return CommandResult(bytes(output), code, total > len(output))

    def remove(self, sandbox: Any) -> None:
        sandbox.terminate()

    def find(self, marks: Mapping[str, str]) -> Iterable[tuple[Mapping[str, str], Any]]:
        import modal

        app = modal.App.lookup(APP, create_if_missing=True)
        for sandbox in modal.Sandbox.list(app_id=app.app_id, tags=dict(marks)):
            yield sandbox.get_tags(), sandbox


def _send(stream: Any, content: bytes) -> None:
    # The command does not read to the end: its exit code says why.
    with suppress(Exception):
        for start in range(0, len(content), CHUNK):
            stream.write(content[start : start + CHUNK])
            stream.drain()
        stream.write_eof()
        stream.drain()
