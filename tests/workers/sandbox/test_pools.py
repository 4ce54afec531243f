"""Tools of a sample's sandbox, and agents' command lines in one, as an engine plays them."""

import asyncio
import shlex
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import cloudpickle
import psutil
import pytest

from tests.workers.sandbox.conftest import needs_bubblewrap
from workers.agents.processes import session_variables
from workers.batch.score import Score
from workers.config.sandbox import SandboxConfig
from workers.environment import Turn
from workers.errors import EpisodeError
from workers.sandbox import tools as sandbox_tools
from workers.sandbox.kinds import export_settings, open_run_sandbox
from workers.sandbox.pools import CALLS, SandboxAgentPool, SandboxToolPool

pytestmark = needs_bubblewrap
SETTINGS = SandboxConfig(kind="bubblewrap", command_timeout_s=5, memory_gib=0.25)
SCHEMAS = [{"function": {"name": name}} for name in (*sandbox_tools.__all__, "add", "sees")]


def add(a: int, b: int) -> int:
    return a + b


def sees(path: str) -> str:
    """Look for a file where the user's own tools run."""
    return str(Path(path).exists())


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": name, "function": {"name": name, "arguments": arguments}}


@asynccontextmanager
async def open_pool(settings: SandboxConfig = SETTINGS) -> AsyncIterator[SandboxToolPool]:
    tools = cloudpickle.dumps(
        {"add": add, "sees": sees} | {name: getattr(sandbox_tools, name) for name in CALLS}
    )
    pool = SandboxToolPool(tools, 20.0, sandbox=settings, max_calls=4, max_characters=40)
    try:
        yield pool
    finally:
        await pool.stop()


async def answers(environment: Any, *calls: dict[str, Any]) -> list[str]:
    observation = await environment.step(Turn("", tool_calls=list(calls)))
    return [message["content"] for message in observation.text]


async def test_the_tools_of_a_sample_act_in_its_own_sandbox() -> None:
    async def play(pool: SandboxToolPool, number: int) -> None:
        async with pool.episode(SCHEMAS) as environment:
            await answers(environment, call("write_file", path="a/b", content=f"{number}"))
            shell, missing, wrong, added = await answers(
                environment,
                call("shell", command="cat a/b; ls | wc -l; exit 3"),
                call("read_file", path="missing"),
                call("shell", line="true"),
                call("add", a=number, b=1),
            )
            (long,) = await answers(environment, call("shell", command="seq 1000"))
        assert shell == f"{number}1\n[exit code 3]"
        assert missing == "Error: /box/missing: No such file or directory"
        assert wrong.startswith("Error:") and "command" in wrong
        assert added == str(number + 1)
        assert "[cut:" in long and len(long) < 100

    async with open_pool() as pool:
        await asyncio.gather(play(pool, 1), play(pool, 2))


async def test_tools_of_the_users_own_run_outside(tmp_path: Path) -> None:
    path = tmp_path / "index"
    path.touch()
    async with open_pool() as pool, pool.episode(SCHEMAS) as environment:
        line = f"test -e {path} && echo True || echo False"
        calls = [call("sees", path=str(path)), call("shell", command=line)]
        assert await answers(environment, *calls) == ["True", "False"]


def children_named(name: str) -> list[psutil.Process]:
    children = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # of another sandbox
            if child.name() == name:
                children.append(child)
    return children


async def test_a_sandbox_that_is_lost_or_does_not_start_fails_the_sample() -> None:
    with pytest.raises(EpisodeError, match="the sandbox ended"):
        async with open_pool() as pool, pool.episode(SCHEMAS) as environment:
            command = call("shell", command="sleep 4")
            turn = asyncio.create_task(answers(environment, command))
            while not children_named("sleep"):
                await asyncio.sleep(0.05)
            for child in children_named("bwrap"):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            await turn
    with pytest.raises(EpisodeError, match="chroot"):
        async with open_pool(SandboxConfig(kind="chroot")) as pool, pool.episode(SCHEMAS):
            pass


AGENT = """
import json, os, pathlib, socket, sys, urllib.parse
record = json.load(sys.stdin)
print("an agent", file=sys.stderr)
if record["do"] == "fail":
    raise ValueError("no price")
if record["do"] == "hang":
    import time
    time.sleep(60)
address = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
answer = b""
with socket.create_connection((address.hostname, address.port)) as gateway:
    gateway.sendall(os.environ["OPENAI_API_KEY"].encode())
    answer = gateway.recv(99)
seen = pathlib.Path(record["secret"]).exists()
print(json.dumps({"reward": 0.5, "right": answer == b"SECRET", "seen": seen}))
"""


def play_agent(record: dict[str, Any], line: str, timeout_s: float = 20.0) -> Score | None:
    async def run(port: int) -> Score | None:
        base_url = f"http://127.0.0.1:{port}/s/a/v1"
        pool = SandboxAgentPool(
            line, timeout_s, sandbox=SETTINGS, memory_gib=2.0, processes=32
        )
        try:
            return await pool.run(
                record, session_variables(base_url, base_url[:-3], "secret")
            )
        finally:
            await pool.stop()

    with socket.create_server(("127.0.0.1", 0)) as gateway:

        def serve() -> None:
            while True:
                try:
                    connection, _ = gateway.accept()
                except OSError:
                    return
                connection.sendall(connection.recv(99).upper())

        Thread(target=serve, daemon=True).start()
        try:
            return asyncio.run(run(gateway.getsockname()[1]))
        finally:
            gateway.shutdown(socket.SHUT_RDWR)


def test_a_command_runs_in_a_sandbox_and_reaches_the_gateway(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    line = shlex.join(["python3", "-c", AGENT])
    score = play_agent({"do": "", "secret": str(secret)}, line)
    assert score == Score(0.5, "", {"right": 1.0, "seen": 0.0})
    with pytest.raises(EpisodeError, match="exit code 1: ValueError: no price"):
        play_agent({"do": "fail"}, line)
    with pytest.raises(EpisodeError, match=r"agent_timeout_s=1\.5"):
        play_agent({"do": "hang"}, line, timeout_s=1.5)


def test_an_environment_opens_the_sandbox_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("BALLAST_SANDBOX", raising=False)
    with pytest.raises(EpisodeError, match=r"rollout\.sandbox\.kind is not set"):
        open_run_sandbox()
    monkeypatch.setenv("BALLAST_SANDBOX", "")
    export_settings(SETTINGS)
    with open_run_sandbox("3", command_s=1.0) as sandbox:
        assert sandbox.limits.command_s == 1.0 and sandbox.limits.memory_mib == 256
        assert sandbox.run("echo on").text == "on\n"
