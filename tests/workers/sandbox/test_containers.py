"""Docker and Podman, by a stand-in for their command lines: what they are asked, and what is left."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import cloudpickle
import psutil
import pytest

from tests.workers.harbor.test_harbor import write_task
from tests.workers.sandbox.contract import (
    OWNER_CODE,
    ROOT,
    check_commands_and_files,
    check_left_over,
    kill_owner,
)
from workers.agents.processes import session_variables
from workers.config.roles import ModelConfig, RolloutConfig
from workers.config.sandbox import SandboxConfig
from workers.errors import ConfigError, EpisodeError
from workers.harbor.environment import HarborEnvironment
from workers.harbor.task_folders import records
from workers.rollout.engine_actor import VllmEngineActor
from workers.sandbox.containers import ContainerSandbox
from workers.sandbox.kinds import (
    VARIABLE,
    _check_kind,
    check_sandbox,
    export_settings,
    open_run_sandbox,
    open_sandbox,
    remove_left_over_sandboxes,
)
from workers.sandbox.owners import OWNER, own_label
from workers.sandbox.pools import SandboxAgentPool
from workers.sandbox.protocol import SandboxError, SandboxFileError, SandboxLimits
from workers.user_code.environments import EnvironmentPool

pytestmark = pytest.mark.drawn(1)
"""Docker or Podman for each test: both take the same lines. Each line starts an interpreter."""
CLIENT = Path(__file__).with_name("fake_container_client.py")
LIMITS = SandboxLimits(
    cpus=0.5, memory_mib=256, processes=8, disk_mib=2, command_s=5, output_bytes=1000
)
needs_unshare = pytest.mark.skipif(
    subprocess.run(["unshare", "-Urnmp", "true"]).returncode != 0, reason="needs unshare"
)


@pytest.fixture(params=["docker", "podman"])
def program(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    state = tmp_path / "state"
    state.mkdir()
    client = tmp_path / "bin" / request.param
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {CLIENT} "$@"\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.defpath}")
    monkeypatch.setenv("FAKE_CLIENT_STATE", str(state))
    _check_kind.cache_clear()
    yield request.param
    _check_kind.cache_clear()


def containers() -> list[Path]:
    return list(Path(os.environ["FAKE_CLIENT_STATE"]).iterdir())


def count() -> int:
    return len(containers())


def make_box(program: str, image: str = "tests/image", **options: Any) -> ContainerSandbox:
    return ContainerSandbox(LIMITS, own_label("7"), program=program, image=image, **options)


def test_commands_and_files(program: str) -> None:
    check_commands_and_files(partial(make_box, program), count)


def test_a_container_has_the_limits_and_refuses_other_files(program: str) -> None:
    with make_box(program) as box:
        (container,) = containers()
        arguments = json.loads((container / "arguments.json").read_text())
        assert {
            "--cpus=0.5",
            "--memory=256m",
            "--memory-swap=256m",
            "--pids-limit=8",
            "--network=none",
            f"--ulimit=fsize={2**21}",
            "--pull=never",
            "--rm",
            "--init",
            "--label=ballast.sample=7",
        } <= set(arguments)
        assert arguments[-2:] == ["-c", "sleep 86400"]
        assert box.run(["nowhere"]).exit_code == 127
        box.run("mkdir folder; truncate -s 3M sparse; mkfifo pipe")
        for path in ("folder", "sparse", "pipe"):
            with pytest.raises(SandboxFileError, match=path):
                box.read(path)
        with pytest.raises(SandboxFileError, match="/dev/null/x"):
            box.write("/dev/null/x", b"")


def test_commands_end_by_a_restart_which_keeps_files(program: str) -> None:
    with make_box(program) as box:
        box.write("kept", b"1")
        box.end_commands()
        (container,) = containers()
        assert (container / "restarted").exists() and box.read("kept") == b"1"
    with pytest.raises(SandboxError):
        box.end_commands()


def test_a_lost_container_fails_its_sample(program: str) -> None:
    with make_box(program) as box:
        subprocess.run([program, "rm", "--force", containers()[0].name], check=True)
        with pytest.raises(EpisodeError, match="No such container"):
            box.run("true")
    with pytest.raises(SandboxError, match="tests/gone"), make_box(program, "tests/gone"):
        pass
    assert not containers()


def test_the_next_start_removes_what_a_killed_owner_left(program: str) -> None:
    foreign = [f"--label={OWNER}=elsewhere_1_2", "--name=foreign", "tests/image"]
    check_left_over(
        f"{program}:tests/image",
        partial(make_box, program),
        count,
        lambda: subprocess.run([program, "run", *foreign], check=True),
    )


def test_an_owner_that_nobody_buried_has_ended(program: str) -> None:
    code = OWNER_CODE.format(kind=f"{program}:tests/image")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as owner:
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        assert psutil.Process(owner.pid).status() == psutil.STATUS_ZOMBIE
        assert remove_left_over_sandboxes(SandboxConfig(kind=f"{program}:tests/image")) == 1


def start_engine(sandbox: SandboxConfig) -> VllmEngineActor:
    """Make an engine's actor, as a run does on each node. It has not started vLLM yet."""
    config = RolloutConfig(sandbox=sandbox, tools="workers.sandbox.tools")
    return VllmEngineActor(
        ModelConfig(path="none"),
        config,
        index=0,
        placement="shared_memory",
        max_model_tokens=64,
        seed=0,
    )


def test_an_engine_refuses_a_node_that_cannot_make_its_sandboxes(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's node could: nothing falls back to a process of the node."""
    monkeypatch.setenv(VARIABLE, "")
    settings = SandboxConfig(kind=f"{program}:tests/image")
    start_engine(settings)
    (tmp_path / "no-daemon").touch()
    _check_kind.cache_clear()  # another node's process
    with pytest.raises(ConfigError, match="Cannot connect"):
        start_engine(settings)


def test_an_engine_removes_at_its_start_what_a_killed_one_left(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    with make_box(program):  # of a run that lives
        kill_owner(f"{program}:tests/image")
        assert count() == 2
        start_engine(SandboxConfig(kind=f"{program}:tests/image"))
        assert count() == 1


def test_an_agents_command_does_not_run_without_its_sandbox(
    program: str, tmp_path: Path
) -> None:
    """A container that does not start fails the session: the command never runs beside it."""
    trace = tmp_path / "trace"
    sandbox = SandboxConfig(kind=f"{program}:tests/gone")
    pool = SandboxAgentPool(
        f"touch {trace}", 20.0, sandbox=sandbox, memory_gib=1.0, processes=8
    )

    async def play() -> None:
        url = "http://127.0.0.1:9/v1"
        try:
            await pool.run({}, session_variables(url, url[:-3], "secret"))
        finally:
            await pool.stop()

    with pytest.raises(EpisodeError, match="tests/gone"):
        asyncio.run(play())
    assert not trace.exists() and not containers()


def test_a_task_has_its_own_image_in_place_of_the_settings(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    export_settings(SandboxConfig(kind=f"{program}:tests/image"))
    image = '[environment]\ndocker_image = "tests/gone"\n'
    folder = write_task(tmp_path / "task", "FROM ubuntu\n", "true", "true", image)
    (record,) = records(f"harbor:{folder}")
    with pytest.raises(SandboxError, match="tests/gone"):
        HarborEnvironment().reset(record)


class NeverStops:
    """An environment that leaves its sandbox to the end of its process."""

    def reset(self, record: dict[str, Any]) -> str:
        open_run_sandbox("3").start()
        return "A shell."


def test_the_end_of_an_engine_removes_what_its_environments_left(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    sandbox = SandboxConfig(kind=f"{program}:tests/image")
    export_settings(sandbox)
    # The real one ends all processes below its actor's, which here is the tests': the servers of forks, too.
    monkeypatch.setattr("workers.rollout.engine_actor.end_engine", lambda engine: None)
    engine = VllmEngineActor.__new__(VllmEngineActor)  # without vLLM
    engine.config = RolloutConfig(sandbox=sandbox)
    engine._engine = engine._gateway = None
    engine._environments = EnvironmentPool(cloudpickle.dumps(NeverStops), 20.0)

    async def play() -> None:
        assert engine._environments is not None
        async with engine._environments.episode() as environment:
            await environment.reset({})
        assert count() == 1
        await engine.stop()

    asyncio.run(play())
    assert not containers()


REACH = """
import json, os, socket, sys, urllib.parse
def ask(host, port):
    try:
        with socket.create_connection((host, port), 2) as connection:
            return connection.recv(99).decode()
    except OSError as error:
        return type(error).__name__
gateway = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
print(json.dumps([ask(gateway.hostname, gateway.port), ask("127.0.0.1", int(sys.argv[1])), ask("192.0.2.1", 80)]))
"""


def serve(word: bytes) -> Iterator[int]:
    """Answer every connection with a word. Yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(word)

        Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@needs_unshare
def test_an_agent_reaches_the_gateway_and_nothing_else(program: str) -> None:
    """In namespaces as those of `--network=none`, the relay's program runs for real."""
    servers = [serve(b"gateway"), serve(b"another")]
    gateway, another = [next(server) for server in servers]
    with make_box(program, gateway=("127.0.0.1", gateway)) as box:
        (container,) = containers()
        given = json.loads((container / "arguments.json").read_text())
        (volume,) = [word for word in given if word.startswith("--volume=")]
        folder = volume.removeprefix("--volume=").removesuffix(":/run/gateway")
        assert Path(folder, "socket").is_socket() and "--network=none" in given
        variables = {"OPENAI_BASE_URL": f"http://127.0.0.1:{gateway}/v1"}
        result = box.run(["python3", "-c", REACH, str(another)], variables=variables)
        assert json.loads(result.text) == ["gateway", "ConnectionRefusedError", "OSError"]
    assert not Path(folder).exists()
    for server in servers:
        next(server, None)


@needs_unshare
def test_a_container_without_python_does_not_start_for_an_agent(program: str) -> None:
    box = make_box(program, "tests/bare", gateway=("127.0.0.1", 9))
    with pytest.raises(SandboxError, match="python3"), box:
        pass
    assert not containers()


@pytest.mark.drawn(2, covers=True)
@pytest.mark.parametrize(
    ("image", "problem"),
    [("tests/gone", "pull tests/gone"), ("", "names no image")],
    ids=["gone", "none"],
)
def test_a_missing_image_is_refused_before_the_run(
    program: str, image: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_sandbox(SandboxConfig(kind=f"{program}:{image}"))
    check_sandbox(SandboxConfig(kind=f"{program}:tests/image"))


def test_a_missing_daemon_client_or_kind_is_refused(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SandboxConfig(kind=f"{program}:tests/image")
    (tmp_path / "no-daemon").touch()
    with pytest.raises(ConfigError, match="Cannot connect"):
        check_sandbox(settings)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="not installed"):
        check_sandbox(settings)
    with pytest.raises(ConfigError, match="bubblewrap, docker, podman"):
        check_sandbox(SandboxConfig(kind="chroot"))
    with pytest.raises(SandboxError):
        open_sandbox(settings, "1").start()
