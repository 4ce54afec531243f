"""Tools of a sample's sandbox, and agents' command lines in one, as an engine plays them."""

import asyncio
import shlex
import socket
from contextlib import suppress
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


def make_pool(settings: SandboxConfig = SETTINGS) -> SandboxToolPool:
    tools = cloudpickle.dumps(
        {"add": add, "sees": sees} | {name: getattr(sandbox_tools, name) for name in CALLS}
    )
    return SandboxToolPool(tools, 20.0, sandbox=settings, max_calls=4, max_characters=40)


def test_the_tools_of_a_sample_act_in_its_own_sandbox() -> None:
    async def play(pool: SandboxToolPool, number: int) -> list[str]:
        async with pool.episode(SCHEMAS) as environment:
            await environment.step(
                Turn("", tool_calls=[call("write_file", path="a/b", content=f"{number}")])
            )
            calls = [
                call("shell", command="cat a/b; ls | wc -l; exit 3"),
                call("read_file", path="missing"),
                call("shell", line="true"),
                call("add", a=number, b=1),
            ]
            observation = await environment.step(Turn("", tool_calls=calls))
            long = await environment.step(
                Turn("", tool_calls=[call("shell", command="seq 1000")])
            )
            return [message["content"] for message in [*observation.text, *long.text]]  # type: ignore[list-item]

    async def play_two() -> list[list[str]]:
        pool = make_pool()
        try:
            return list(await asyncio.gather(play(pool, 1), play(pool, 2)))
        finally:
            await pool.stop()

    for number, (shell, missing, wrong, added, long) in enumerate(
        asyncio.run(play_two()), start=1
    ):
        assert shell == f"{number}1\n[exit code 3]"
        assert missing == "Error: /box/missing: No such file or directory"
        assert wrong.startswith("Error:") and "command" in wrong
        assert added == str(number + 1)
        assert "[cut:" in long and len(long) < 100


def test_tools_of_the_users_own_run_outside(tmp_path: Path) -> None:
    (tmp_path / "index").touch()

    async def play() -> list[str]:
        pool = make_pool()
        try:
            async with pool.episode(SCHEMAS) as environment:
                path = str(tmp_path / "index")
                calls = [
                    call("sees", path=path),
                    call("shell", command=f"test -e {path} && echo True || echo False"),
                ]
                observation = await environment.step(Turn("", tool_calls=calls))
                return [message["content"] for message in observation.text]  # type: ignore[misc]
        finally:
            await pool.stop()

    assert asyncio.run(play()) == ["True", "False"]


def test_a_sandbox_that_is_lost_or_does_not_start_fails_the_sample() -> None:
    async def lose() -> None:
        pool = make_pool()
        try:
            async with pool.episode(SCHEMAS) as environment:
                step = environment.step(
                    Turn("", tool_calls=[call("shell", command="sleep 4")])
                )
                turn = asyncio.create_task(step)  # type: ignore[arg-type]
                await asyncio.sleep(0.5)
                # Processes of other sandboxes may end meanwhile.
                for child in psutil.Process().children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        if child.name() == "bwrap":
                            child.kill()
                await turn
        finally:
            await pool.stop()

    async def start() -> None:
        async with make_pool(SandboxConfig(kind="chroot")).episode(SCHEMAS):
            pass

    with pytest.raises(EpisodeError, match="the sandbox ended"):
        asyncio.run(lose())
    with pytest.raises(EpisodeError, match="chroot"):
        asyncio.run(start())


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
