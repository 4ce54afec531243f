"""The protocol of a sandbox: start, run, read, write, stop, under limits, for one sample."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from workers.errors import EpisodeError

MIB = 2**20


class SandboxError(EpisodeError):
    """A sandbox did not start, or was lost. Only its sample fails."""


class SandboxFileError(SandboxError):
    """A file of a sandbox cannot be read or written. The sandbox itself still works."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one sandbox.

    cpus: cores. memory_mib: of all processes. processes: at the same time, threads too. command_s: wall time
    of a command. disk_mib: of all files that it writes. output_bytes: of a command's output that are kept.
    network: whether it reaches more than the gateway of agents. lifetime_s: after which a sandbox that
    nobody stopped ends.
    """

    cpus: float = 1.0
    memory_mib: int = 1024
    processes: int = 64
    command_s: float = 60.0
    disk_mib: int = 1024
    output_bytes: int = 65_536
    network: bool = False
    lifetime_s: float = 86_400.0


@dataclass(frozen=True)
class SandboxLabel:
    """Labels by which sandboxes are found again. owner: the process that opened it. sample: of the run."""

    owner: str
    sample: str


@dataclass(frozen=True)
class CommandResult:
    """The end of a command.

    output: standard output and errors together, at most `output_bytes`. exit_code: 128 + number for a signal.
    cut: whether there was more output. timed_out: whether the command took too long and was killed.
    """

    output: bytes
    exit_code: int
    cut: bool = False
    timed_out: bool = False

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")


class Sandbox(ABC):
    """One sandbox. A context manager: start at its beginning, stop at its end.

    Methods block, may be called from any thread, and raise SandboxError.
    """

    def __init__(self, limits: SandboxLimits, label: SandboxLabel) -> None:
        self.limits = limits
        self.label = label

    @abstractmethod
    def start(self) -> None:
        """Start the sandbox, without files of this machine."""

    @abstractmethod
    def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes = b"",
        variables: Mapping[str, str] | None = None,
        folder: str = "",
        timeout_s: float | None = None,
    ) -> CommandResult:
        """Run a command line with `sh -c`, or a program with arguments, to its end.

        folder: where it runs, empty for the sandbox's own. timeout_s: less than limits.command_s. Files and
        background processes stay for the next command, unless this one takes too long.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return a file. Raises SandboxFileError."""

    @abstractmethod
    def write(self, path: str, content: bytes) -> None:
        """Write a file, and the folders above it. Raises SandboxFileError."""

    @abstractmethod
    def end_commands(self) -> None:
        """End all processes that commands left. Files stay."""

    @abstractmethod
    def stop(self) -> None:
        """End all its processes and remove its files. Does nothing a second time."""

    def seconds_of(self, timeout_s: float | None) -> float:
        """Return the time limit of a command."""
        if timeout_s is None:
            return self.limits.command_s
        return min(timeout_s, self.limits.command_s)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def argument_list(command: str | Sequence[str]) -> list[str]:
    """Return the arguments that start a command."""
    if isinstance(command, str):
        return ["/bin/sh", "-c", command]
    return list(command)
