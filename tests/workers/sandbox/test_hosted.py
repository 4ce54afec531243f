"""Hosted sandboxes, by the services' own SDKs against stand-ins: what is asked of them, and what is left."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refused
from tests.workers.sandbox.contract import (
    LIMITS,
    check_commands_and_files,
    check_left_over,
)
from tests.workers.sandbox.hosted_machines import GONE, Machines
from workers.config.sandbox import SandboxConfig
from workers.errors import ConfigError, EpisodeError
from workers.harbor.task_folders import check_tasks
from workers.sandbox.hosted import HostedSandbox
from workers.sandbox.kinds import (
    SERVICES,
    _check_kind,
    check_agent_command,
    check_sandbox,
)
from workers.sandbox.owners import HOST, OWNER, SAMPLE, labels, own_label
from workers.sandbox.protocol import SandboxError

KEY = f"e2b_{'0' * 40}"
ADDRESSES = {
    "modal": ("MODAL_SERVER_URL",),
    "daytona": ("DAYTONA_API_URL",),
    "e2b": ("E2B_API_URL", "E2B_SANDBOX_URL"),
}


@pytest.fixture(params=list(ADDRESSES))
def service(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


@pytest.fixture
def machines(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machines]:
    machines = Machines(tmp_path, KEY)
    fake = import_module(f"tests.workers.sandbox.fake_{service}")
    server = fake.serve_machines(machines)
    port = next(server)
    for variable in ADDRESSES[service]:
        monkeypatch.setenv(variable, f"http://127.0.0.1:{port}")
    monkeypatch.setenv("MODAL_CONFIG_PATH", "/nowhere")
    for variable in SERVICES[service].variables:
        monkeypatch.setenv(variable, KEY)
    _check_kind.cache_clear()
    yield machines
    _check_kind.cache_clear()
    next(server, None)


def make_box(service: str, image: str = "tests/image") -> HostedSandbox:
    return HostedSandbox(LIMITS, own_label("7"), service=SERVICES[service], image=image)


def check_e2b_request(asked: dict[str, Any]) -> None:
    assert asked["templateID"] == "tests/image" and asked["allow_internet_access"] is False
    assert asked["timeout"] == 3600


def check_modal_request(asked: Any) -> None:
    request, image = asked
    definition = request.definition
    resources = definition.resources
    access = definition.network_access
    assert image == "tests/image" and access.network_access_type == type(access).BLOCKED
    assert (resources.milli_cpu, resources.milli_cpu_max) == (1000, 1000)
    assert (resources.memory_mb, resources.memory_mb_max) == (2048, 2048)
    assert (definition.timeout_secs, definition.idle_timeout_secs) == (86_400, 3600)


def check_daytona_request(asked: dict[str, Any]) -> None:
    assert (
        "FROM tests/image" in asked["buildInfo"]["dockerfileContent"]
        and asked["networkBlockAll"] is True
    )
    assert (asked["cpu"], asked["memory"], asked["disk"]) == (1, 2, 2)
    assert (asked["autoStopInterval"], asked["autoDeleteInterval"]) == (60, 0)


REQUESTS: dict[str, Callable[[Any], None]] = {
    "modal": check_modal_request,
    "daytona": check_daytona_request,
    "e2b": check_e2b_request,
}


def test_commands_and_files(service: str, machines: Machines) -> None:
    check_commands_and_files(partial(make_box, service), machines.count)


def test_a_service_is_asked_for_limits_and_no_network(
    service: str, machines: Machines
) -> None:
    with make_box(service):
        (machine,) = machines.machines.values()
        assert set(machine.marks) >= {OWNER, SAMPLE, HOST} and machine.marks[SAMPLE] == "7"
        REQUESTS[service](machine.asked)


def test_a_lost_sandbox_fails_its_sample(service: str, machines: Machines) -> None:
    with make_box(service) as box:
        machines.machines.clear()
        with pytest.raises(EpisodeError, match=f"the sandbox ended: {service}: "):
            box.run("true")
        with pytest.raises(EpisodeError, match="not running"):
            box.run("true")
    with pytest.raises(SandboxError, match=service), make_box(service, GONE):
        pass
    assert not machines.machines


def test_the_next_start_removes_what_a_killed_owner_left(
    service: str, machines: Machines
) -> None:
    check_left_over(
        f"{service}:tests/image",
        partial(make_box, service),
        machines.count,
        lambda: machines.add({OWNER: "elsewhere_1_2", HOST: "elsewhere"}, {}),
    )


def test_a_key_or_image_that_the_service_refuses_is_named_before_the_run(
    service: str, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_sandbox(SandboxConfig(kind=f"{service}:tests/image"))
    assert not machines.machines
    with pytest.raises(ConfigError, match=f"{service}:{GONE}"):
        check_sandbox(SandboxConfig(kind=f"{service}:{GONE}"))
    machines.key = "another"
    _check_kind.cache_clear()
    with pytest.raises(ConfigError, match=f"{service}:tests/image: {service}: "):
        check_sandbox(SandboxConfig(kind=f"{service}:tests/image"))
    for variable in SERVICES[service].variables:
        monkeypatch.delenv(variable)
    _check_kind.cache_clear()
    with pytest.raises(ConfigError, match=SERVICES[service].variables[0]):
        check_sandbox(SandboxConfig(kind=f"{service}:tests/image"))


NOT_HELD = [
    *(("e2b", name, 2) for name in ("cpus", "memory_gib", "disk_gib", "processes")),
    *(("modal", name, 2) for name in ("disk_gib", "processes")),
    ("daytona", "processes", 2),
    *(("daytona", name, 1.5) for name in ("cpus", "memory_gib", "disk_gib")),
]


@pytest.mark.parametrize(("kind", "name", "value"), NOT_HELD)
def test_a_limit_that_the_service_does_not_hold_is_refused(
    kind: str, name: str, value: float
) -> None:
    settings = SandboxConfig(kind=f"{kind}:tests/image", **{name: value})  # type: ignore[arg-type]
    with refused(f"rollout.sandbox.{name}={value}: ", ConfigError):
        check_sandbox(settings)


def test_labels_have_values_that_every_service_takes() -> None:
    for sample, value in [("", "none"), ("a task/7", "a-task-7"), ("x" * 99, "x" * 63)]:
        assert labels(own_label(sample))[SAMPLE] == value


@pytest.mark.parametrize("kind", SERVICES)
def test_what_is_missing_is_named_before_the_run(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_kind.cache_clear()
    with pytest.raises(ConfigError, match="names no "):
        check_sandbox(SandboxConfig(kind=kind))
    monkeypatch.setattr("workers.sandbox.hosted.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf'pip install "ballast-rl\[{kind}\]"'):
        check_sandbox(SandboxConfig(kind=f"{kind}:tests/image"))
    with pytest.raises(ConfigError, match="gateway"):
        check_agent_command(f"{kind}:tests/image")


def test_tasks_with_images_refuse_templates() -> None:
    with pytest.raises(ConfigError, match="e2b:base: tasks name images"):
        check_tasks("harbor:tasks", "e2b:base", 600.0)
