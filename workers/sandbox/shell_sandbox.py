"""What sandboxes have in common that run commands in an image by `exec`: its shell limits, reads and
writes.
"""

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from workers.sandbox.protocol import (
    MIB,
    CommandResult,
    Sandbox,
    SandboxFileError,
    argument_list,
)

KILLED = (124, 137)  # exit codes of `timeout`
NOT_A_FILE = 66
FILE_SECONDS = 120.0
RUN = 'cd "${1:-.}" || exit 126; seconds=$2; shift 2; exec timeout -s KILL "$seconds" "$@" 2>&1'
READ = f'[ -f "$1" ] || exit {NOT_A_FILE}; exec head -c "$2" -- "$1"'
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'


class ShellSandbox(Sandbox):
    """A sandbox of an image that has `sh`, `timeout`, `head`, `cat`, `mkdir` and `dirname`."""

    @abstractmethod
    def execute(
        self, arguments: Sequence[str], stdin: bytes, seconds: float, longest: int
    ) -> CommandResult:
        """Run a program of the image. seconds: after which the sandbox is lost. longest: bytes of output."""

    def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes = b"",
        variables: Mapping[str, str] | None = None,
        folder: str = "",
        timeout_s: float | None = None,
    ) -> CommandResult:
        seconds = self.seconds_of(timeout_s)
        assignments = [f"{name}={value}" for name, value in (variables or {}).items()]
        program = ["env", *assignments, *argument_list(command)]
        start = time.monotonic()
        result = self._shell(
            RUN, folder, f"{seconds:g}", *program, stdin=stdin, seconds=seconds
        )
        timed_out = result.exit_code in KILLED and time.monotonic() - start >= seconds
        return CommandResult(result.output, result.exit_code, result.cut, timed_out)

    def read(self, path: str) -> bytes:
        longest = self.limits.disk_mib * MIB
        result = self._shell(READ, path, str(longest + 1), longest=longest + 1)
        if result.exit_code == NOT_A_FILE:
            raise SandboxFileError(f"{path}: no such file")
        if result.exit_code:
            raise SandboxFileError(
                f"{path}: it cannot be read (exit code {result.exit_code})"
            )
        if len(result.output) > longest:
            raise SandboxFileError(f"{path}: more than {longest:,} bytes")
        return result.output

    def write(self, path: str, content: bytes) -> None:
        result = self._shell(WRITE, path, stdin=content)
        if result.exit_code:
            reason = result.text.strip() or f"exit code {result.exit_code}"
            raise SandboxFileError(f"{path}: it cannot be written: {reason}")

    def _shell(
        self,
        script: str,
        *arguments: str,
        stdin: bytes = b"",
        seconds: float = FILE_SECONDS,
        longest: int = 0,
    ) -> CommandResult:
        program = ["sh", "-c", script, "sh", *arguments]
        return self.execute(program, stdin, seconds, longest or self.limits.output_bytes)
