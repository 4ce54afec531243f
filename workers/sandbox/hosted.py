"""Sandboxes that a service lends, each by its SDK.

HostedSandbox --create, execute, remove--> Service --SDK--> a machine of the service
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, TypeVar

from workers.errors import ConfigError, describe_error
from workers.sandbox.owners import HOST, OWNER, host_name, is_left_over, labels, own_label
from workers.sandbox.protocol import (
    CommandResult,
    SandboxError,
    SandboxLabel,
    SandboxLimits,
)
from workers.sandbox.shell_sandbox import ShellSandbox

IDLE_SECONDS = 3600
"""A sandbox without a command for this long ends by itself. Nobody pays a day for a machine that was lost."""
START_SECONDS = 600
GRACE_SECONDS = 15.0

Answer = TypeVar("Answer")


class Service(ABC):
    """What differs between services. Methods raise whatever the SDK raises."""

    name: str
    needed: str
    """What the name in the setting stands for."""
    variables: tuple[str, ...]
    """Environment variables with the key. All of them are needed."""

    @abstractmethod
    def create(self, image: str, limits: SandboxLimits, marks: Mapping[str, str]) -> Any:
        """Start a sandbox and return it. marks: by which it is found again."""

    @abstractmethod
    def execute(
        self,
        sandbox: Any,
        arguments: Sequence[str],
        stdin: bytes,
        seconds: float,
        longest: int,
    ) -> CommandResult:
        """Run a program. seconds: after which the call fails. longest: bytes of output."""

    @abstractmethod
    def remove(self, sandbox: Any) -> None:
        """End a sandbox, which may have ended by itself."""

    @abstractmethod
    def find(self, marks: Mapping[str, str]) -> Iterable[tuple[Mapping[str, str], Any]]:
        """Return the sandboxes that have these marks, each with all of its marks."""

    def has_key(self) -> bool:
        return all(os.environ.get(variable) for variable in self.variables)


class HostedSandbox(ShellSandbox):
    """A sandbox of a service."""

    def __init__(
        self, limits: SandboxLimits, label: SandboxLabel, *, service: Service, image: str
    ) -> None:
        super().__init__(limits, label)
        self._service = service
        self._image = image
        self._sandbox: Any = None
        self._state = "call start first"

    def start(self) -> None:
        marks = labels(self.label)
        self._sandbox = call_service(
            self._service, self._service.create, self._image, self.limits, marks
        )
        self._state = ""

    def execute(
        self, arguments: Sequence[str], stdin: bytes, seconds: float, longest: int
    ) -> CommandResult:
        if self._state:
            raise SandboxError(f"the sandbox is not running: {self._state}")
        seconds += GRACE_SECONDS
        try:
            return call_service(
                self._service,
                self._service.execute,
                self._sandbox,
                arguments,
                stdin,
                seconds,
                longest,
            )
        except SandboxError as error:
            with suppress(SandboxError):  # the first error says more
                self.stop()
            self._state = str(error)
            raise SandboxError(f"the sandbox ended: {error}") from None

    def end_commands(self) -> None:
        """Do nothing: no service restarts a machine with its files, or tells commands from its daemon."""

    def stop(self) -> None:
        if self._state:
            return
        self._state = "it was stopped"
        call_service(self._service, self._service.remove, self._sandbox)


def call_service(
    service: Service, method: Callable[..., Answer], *arguments: Any
) -> Answer:
    """Call an SDK. Raises SandboxError."""
    try:
        return method(*arguments)
    except (
        Exception
    ) as error:  # the SDKs' errors have no common root, and E2B raises plain Exception too
        raise SandboxError(f"{service.name}: {describe_error(error)}") from None


def check_service(key: str, service: Service, image: str, limits: SandboxLimits) -> None:
    """Start a sandbox for a moment. Raises ConfigError if the SDK, a key or the image is missing."""
    setting = f"{key}={service.name}:{image}"
    if not image:
        raise ConfigError(
            f"{key}={service.name}: it names no {service.needed.lower()}. "
            f"Set {service.name}:{service.needed}."
        )
    if find_spec(service.name) is None:
        raise ConfigError(
            f"{setting}: the package {service.name} is not installed. Install it on every node that samples: "
            f'`pip install "ballast-rl[{service.name}]"`.'
        )
    if not service.has_key():
        variables = " and ".join(service.variables)
        raise ConfigError(
            f"{setting}: there is no key. Set the environment variable {variables}."
        )
    try:
        with HostedSandbox(
            limits, own_label("check"), service=service, image=image
        ) as sandbox:
            sandbox.run("true")
    except SandboxError as error:
        raise ConfigError(
            f"{setting}: {error}. Check the {service.needed.lower()} and the key."
        ) from None


def remove_left_over_hosted(service: Service) -> int:
    """Remove the sandboxes of processes of this machine that have ended. Returns how many."""
    sandboxes = call_service(service, lambda: list(service.find({HOST: host_name()})))
    left_over = [
        sandbox for marks, sandbox in sandboxes if is_left_over(marks.get(OWNER, ""))
    ]
    for sandbox in left_over:
        call_service(service, service.remove, sandbox)
    return len(left_over)
