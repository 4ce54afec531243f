"""The kinds of sandboxes by the name in a setting: what each needs, how it is opened, what is left over."""

import json
import os
from dataclasses import asdict, replace
from functools import cache

from workers.config.sandbox import SandboxConfig
from workers.errors import ConfigError
from workers.sandbox.bubblewrap import TRIAL_LABEL, TRIAL_LIMITS, BubblewrapSandbox
from workers.sandbox.containers import (
    PROGRAMS,
    ContainerSandbox,
    check_container,
    remove_left_over,
)
from workers.sandbox.daytona_service import DaytonaService
from workers.sandbox.e2b_service import E2bService
from workers.sandbox.hosted import (
    HostedSandbox,
    Service,
    check_service,
    remove_left_over_hosted,
)
from workers.sandbox.modal_service import ModalService
from workers.sandbox.owners import own_label
from workers.sandbox.pods import (
    KUBERNETES,
    PodSandbox,
    check_cluster,
    remove_left_over_pods,
)
from workers.sandbox.protocol import Sandbox, SandboxError, SandboxLimits

BUBBLEWRAP = "bubblewrap"
SERVICES: dict[str, Service] = {
    service.name: service for service in (ModalService(), DaytonaService(), E2bService())
}
KINDS = (BUBBLEWRAP, *PROGRAMS, KUBERNETES, *SERVICES)
LOCAL = (BUBBLEWRAP, *PROGRAMS)
"""Kinds whose sandboxes reach the gateway of agents on their machine."""
KEY = "rollout.sandbox.kind"
VARIABLE = "BALLAST_SANDBOX"
"""Environment variable with the run's settings, for environments."""
NOT_HELD = {
    KUBERNETES: {
        "processes": "a pod has the limit of its node (podPidsLimit of the kubelet)"
    },
    "modal": {
        "processes": "Modal has no such limit",
        "disk_gib": "Modal has no such limit",
    },
    "daytona": {"processes": "Daytona has no such limit"},
    "e2b": {
        "cpus": "a sandbox has its template's",
        "memory_gib": "a sandbox has its template's",
        "processes": "E2B has no such limit",
        "disk_gib": "a sandbox has its template's",
    },
}
"""Settings that a kind cannot hold, and why."""


def check_sandbox(settings: SandboxConfig) -> None:
    """Raise ConfigError if this machine cannot make the sandbox. No weaker one takes its place."""
    kind = settings.kind.partition(":")[0]
    if settings.network and kind == BUBBLEWRAP:
        raise ConfigError(
            f"rollout.sandbox.network=true: {KEY}={settings.kind} has no network. Remove it, or use "
            "docker:IMAGE."
        )
    for name, reason in NOT_HELD.get(kind, {}).items():
        value = getattr(settings, name)
        if value != getattr(SandboxConfig(), name):
            raise ConfigError(f"rollout.sandbox.{name}={value:g}: {reason}. Remove it.")
    if kind == "daytona":
        _check_whole_numbers(settings)
    _check_kind(settings.kind, limits_of(settings))


def _check_whole_numbers(settings: SandboxConfig) -> None:
    for name in ("cpus", "memory_gib", "disk_gib"):
        value = getattr(settings, name)
        if value != int(value):
            raise ConfigError(
                f"rollout.sandbox.{name}={value:g}: Daytona takes whole numbers. Round it up."
            )


def check_agent_command(kind: str) -> None:
    """Raise ConfigError if sandboxes of this kind do not reach the gateway of rollout.agent_command."""
    if kind.partition(":")[0] not in LOCAL:
        raise ConfigError(
            f"{KEY}={kind}: its sandboxes do not reach the gateway of rollout.agent_command. Use one of: "
            f"{', '.join(LOCAL)}. Or use rollout.agent=http."
        )


@cache
def _check_kind(text: str, limits: SandboxLimits) -> None:
    kind, _, image = text.partition(":")
    if kind not in KINDS:
        raise ConfigError(
            f"{KEY}={text}: there is no such kind. Use one of: {', '.join(KINDS)}."
        )
    if kind in PROGRAMS:
        check_container(KEY, kind, image)
    elif kind == KUBERNETES:
        check_cluster(KEY, image)
    elif kind in SERVICES:
        check_service(KEY, SERVICES[kind], image, limits)
    else:
        _check_bubblewrap(text, _folders(image))


def _check_bubblewrap(text: str, folders: list[str]) -> None:
    missing = [folder for folder in folders if not os.path.isdir(folder)]
    if missing:
        raise ConfigError(
            f"{KEY}={text}: {missing[0]} is not a folder. Name folders that commands may read."
        )
    try:
        with BubblewrapSandbox(TRIAL_LIMITS, TRIAL_LABEL, folders=folders):
            pass
    except SandboxError as error:
        raise ConfigError(
            f"{KEY}={text}: {error}. Install bubblewrap 0.8 or later and allow user namespaces, or use "
            "another kind."
        ) from None


def limits_of(settings: SandboxConfig) -> SandboxLimits:
    return SandboxLimits(
        cpus=settings.cpus,
        memory_mib=max(1, int(settings.memory_gib * 1024)),
        processes=settings.processes,
        command_s=settings.command_timeout_s,
        disk_mib=max(1, int(settings.disk_gib * 1024)),
        network=settings.network,
    )


def open_sandbox(
    settings: SandboxConfig,
    sample: str,
    *,
    limits: SandboxLimits | None = None,
    gateway: tuple[str, int] | None = None,
) -> Sandbox:
    """Return a sandbox to start, `with open_sandbox(...) as sandbox`.

    sample: names it. limits: empty for those of the settings. gateway: host and port that it reaches as
    127.0.0.1 and this port.
    """
    kind, _, image = settings.kind.partition(":")
    limits = limits or limits_of(settings)
    label = own_label(sample)
    if kind == BUBBLEWRAP:
        return BubblewrapSandbox(limits, label, gateway=gateway, folders=_folders(image))
    if kind in PROGRAMS:
        return ContainerSandbox(limits, label, program=kind, image=image, gateway=gateway)
    if gateway is not None:
        raise SandboxError(
            f"{KEY}={settings.kind}: it does not reach the gateway of agents"
        )
    if kind == KUBERNETES:
        return PodSandbox(limits, label, image=image)
    if kind in SERVICES:
        return HostedSandbox(limits, label, service=SERVICES[kind], image=image)
    raise SandboxError(f"{KEY}={settings.kind}: there is no such kind")


def remove_left_over_sandboxes(settings: SandboxConfig) -> int:
    """Remove the sandboxes of processes of this machine that have ended, such as a killed run's."""
    kind = settings.kind.partition(":")[0]
    if kind in PROGRAMS:
        return remove_left_over(kind)
    if kind in SERVICES:
        return remove_left_over_hosted(SERVICES[kind])
    # Bubblewrap's end with their owner.
    return remove_left_over_pods() if kind == KUBERNETES else 0


def export_settings(settings: SandboxConfig) -> None:
    """Give the settings to processes that this one starts, for `open_run_sandbox`."""
    os.environ[VARIABLE] = json.dumps(asdict(settings))


def run_settings() -> SandboxConfig:
    """Return `rollout.sandbox` of the run. Raises SandboxError if it has none."""
    values = json.loads(os.environ.get(VARIABLE, "{}"))
    settings = SandboxConfig(**values)
    if not settings.kind:
        raise SandboxError(f"{KEY} is not set, and the environment opens a sandbox")
    return settings


def open_run_sandbox(sample: str = "", **limits: float) -> Sandbox:
    """Return a sandbox of `rollout.sandbox`, to start, for an environment. limits: of SandboxLimits, others
    than the settings'. Raises SandboxError if the run has none.
    """
    settings = run_settings()
    changed = replace(limits_of(settings), **limits)  # type: ignore[arg-type]
    return open_sandbox(settings, sample, limits=changed)


def _folders(text: str) -> list[str]:
    return [os.path.abspath(folder) for folder in text.split(":") if folder]
