"""Sandboxes of Docker and Podman, by their command lines.

run --detach --rm IMAGE sleep LIFETIME --> exec --> exec --> rm --force
"""

import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from threading import Thread
from typing import IO

from workers.errors import ConfigError
from workers.sandbox.gateway_relay import GatewayRelay
from workers.sandbox.owners import OWNER, is_left_over, labels
from workers.sandbox.protocol import (
    CommandResult,
    SandboxError,
    SandboxLabel,
    SandboxLimits,
)
from workers.sandbox.shell_sandbox import ShellSandbox

PROGRAMS = ("docker", "podman")
GRACE_SECONDS = 15.0
CLIENT_SECONDS = 120.0
CHUNK = 2**16


class ContainerSandbox(ShellSandbox):
    """A container. Images are not pulled: what a run needs is on its machines before."""

    def __init__(
        self,
        limits: SandboxLimits,
        label: SandboxLabel,
        *,
        program: str,
        image: str,
        gateway: tuple[str, int] | None = None,
    ) -> None:
        """program: docker or podman. gateway: host and port that commands reach as 127.0.0.1 and this
        port.
        """
        super().__init__(limits, label)
        self._program = program
        self._image = image
        self._gateway = gateway
        self._relay: GatewayRelay | None = None
        self._name = f"ballast-{uuid.uuid4().hex[:16]}"
        self._state = "call start first"

    def start(self) -> None:
        if self._gateway:
            self._relay = GatewayRelay(*self._gateway)
        self._state = ""
        self._client(
            "run",
            *self._options(),
            self._image,
            "-c",
            f"sleep {self.limits.lifetime_s:.0f}",
        )
        if self._gateway:
            source = Path(__file__).with_name("supervisor.py").read_text()
            self._client("exec", self._name, "python3", "-c", source, str(self._gateway[1]))

    def execute(
        self, arguments: Sequence[str], stdin: bytes, seconds: float, longest: int
    ) -> CommandResult:
        if self._state:
            raise SandboxError(f"the sandbox is not running: {self._state}")
        command = [self._program, "exec", "--interactive", self._name, *arguments]
        result, errors = run_client(command, stdin, seconds + GRACE_SECONDS, longest)
        if result.timed_out:
            self.stop()
            raise SandboxError(
                f"the sandbox ended: it did not answer in {seconds + GRACE_SECONDS:g} s"
            )
        # The client's own errors. A command's are part of its output.
        if errors and result.exit_code and not self._is_running():
            self._state = errors.decode(errors="replace").strip().splitlines()[-1]
            raise SandboxError(f"the sandbox ended: {self._state}")
        return CommandResult(result.output + errors, result.exit_code, result.cut)

    def end_commands(self) -> None:
        # A command inside could not tell the container's own process from others, or trust its shell.
        if self._state:
            raise SandboxError(f"the sandbox is not running: {self._state}")
        self._client("restart", "--time=0", self._name)

    def stop(self) -> None:
        if self._state:
            return
        self._state = "it was stopped"
        if self._relay is not None:
            self._relay.close()
        run_client(
            [self._program, "rm", "--force", "--volumes", self._name],
            b"",
            CLIENT_SECONDS,
            CHUNK,
        )

    def _options(self) -> list[str]:
        limits = self.limits
        options = [
            "--detach",
            "--rm",
            "--init",
            "--pull=never",
            f"--name={self._name}",
            "--entrypoint=sh",
        ]
        options += [f"--label={name}={value}" for name, value in labels(self.label).items()]
        options += [f"--cpus={limits.cpus:g}", f"--pids-limit={limits.processes}"]
        options += [f"--memory={limits.memory_mib}m", f"--memory-swap={limits.memory_mib}m"]
        # Of one file: a limit of all needs a file system with quotas.
        options += [f"--ulimit=fsize={limits.disk_mib * 2**20}", "--ulimit=core=0"]
        options += ["--security-opt=no-new-privileges", "--cap-drop=NET_RAW"]
        if not limits.network:
            options.append("--network=none")
        if self._relay is not None:
            options.append(f"--volume={self._relay.folder}:/run/gateway")
        return options

    def _is_running(self) -> bool:
        command = [
            self._program,
            "container",
            "inspect",
            "--format",
            "{{.State.Running}}",
            self._name,
        ]
        result, _ = run_client(command, b"", CLIENT_SECONDS, CHUNK)
        return result.text.strip() == "true"

    def _client(self, *arguments: str) -> str:
        return ask_client(self._program, *arguments)


def ask_client(program: str, *arguments: str) -> str:
    """Return what a client prints. Raises SandboxError if it fails."""
    result, errors = run_client([program, *arguments], b"", CLIENT_SECONDS, 2**20)
    if result.exit_code or result.timed_out:
        lines = (errors or result.output).decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {result.exit_code}"
        raise SandboxError(f"{program} {arguments[0]}: {reason}")
    return result.text


def check_container(key: str, program: str, image: str) -> None:
    """Raise ConfigError if the client, its daemon or the image is missing here."""
    setting = f"{key}={program}:{image}"
    if not image:
        raise ConfigError(f"{key}={program}: it names no image. Set {program}:IMAGE.")
    if which(program) is None:
        raise ConfigError(
            f"{setting}: {program} is not installed. Install it on every node that samples."
        )
    try:
        ask_client(
            program,
            "info",
            "--format",
            "{{.OSType}}" if program == "docker" else "{{.Host.OS}}",
        )
    except SandboxError as error:
        raise ConfigError(
            f"{setting}: {error}. Start its service, or give this user access to it."
        ) from None
    try:
        ask_client(program, "image", "inspect", "--format", "{{.Id}}", image)
    except SandboxError as error:
        raise ConfigError(
            f"{setting}: {error}. Run `{program} pull {image}` on every node."
        ) from None


def remove_left_over(program: str) -> int:
    """Remove the containers of processes of this machine that have ended. Returns how many."""
    listing = ask_client(
        program,
        "ps",
        "--all",
        f"--filter=label={OWNER}",
        f'--format={{{{.ID}}}} {{{{.Label "{OWNER}"}}}}',
    )
    pairs = [line.split() for line in listing.splitlines()]
    names = [name for name, owner in pairs if is_left_over(owner)]
    if names:
        ask_client(program, "rm", "--force", "--volumes", *names)
    return len(names)


def run_client(
    command: Sequence[str], stdin: bytes, seconds: float, longest: int
) -> tuple[CommandResult, bytes]:
    """Run a program of this machine. Returns its result, `timed_out` if it was killed, and its errors."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise SandboxError(f"{command[0]}: {error.strerror}") from None
    assert process.stdin and process.stdout and process.stderr
    output = bytearray()
    errors = bytearray()
    total = [0]

    def collect(stream: IO[bytes], target: bytearray, most: int) -> None:
        while part := stream.read1(CHUNK):  # type: ignore[attr-defined]
            target += part[: most - len(target)]
            total[0] += len(part) if target is output else 0

    def send(stream: IO[bytes]) -> None:
        try:
            stream.write(stdin)
            stream.close()
        except OSError:  # it does not read to the end
            pass

    threads = [
        Thread(target=collect, args=(process.stdout, output, longest), daemon=True),
        Thread(target=collect, args=(process.stderr, errors, CHUNK), daemon=True),
        Thread(target=send, args=(process.stdin,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    timed_out = False
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
        process.kill()
        process.wait()
    for thread in threads:
        thread.join(5)
    code = process.returncode
    exit_code = 128 - code if code < 0 else code
    return CommandResult(
        bytes(output), exit_code, total[0] > len(output), timed_out
    ), bytes(errors)
