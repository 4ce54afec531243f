"""What an engine plays in sandboxes: tools of a sample's sandbox, and an agent's command line.

SandboxToolPool.episode --start--> sandbox <--shell, read_file, write_file-- calls of the policy
SandboxAgentPool.run --> process of the session --start--> sandbox --> the command, to the gateway alone
"""

import inspect
import os
import shlex
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import cloudpickle

from workers.agents.processes import AgentPool, as_json, error_in, reward_in
from workers.batch.score import Score
from workers.config.sandbox import SandboxConfig
from workers.errors import LONGEST_QUOTE, EpisodeError
from workers.sandbox import tools as sandbox_tools
from workers.sandbox.kinds import limits_of, open_sandbox, remove_left_over_sandboxes
from workers.sandbox.protocol import Sandbox, SandboxFileError
from workers.user_code.environments import RemoteEnvironment
from workers.user_code.session_keys import hide_session_keys
from workers.user_code.tools import ToolEnvironment, ToolPool, cut_text

VARIABLES = (
    "OPENAI_BASE_URL",
    "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_KEY",
    "BALLAST_SESSION_URL",
)
LONGEST_OUTPUT = 2**24
ERRORS = "/tmp/agent-errors"
WITH_ERRORS = 'exec "$@" 2> "$0"'


class SandboxToolPool(ToolPool):
    """Tools, of which those of `workers.sandbox.tools` act in the sandbox of their sample."""

    def __init__(
        self,
        tools: bytes,
        timeout_s: float,
        *,
        sandbox: SandboxConfig,
        max_calls: int,
        max_characters: int,
    ) -> None:
        super().__init__(
            tools, timeout_s, max_calls=max_calls, max_characters=max_characters
        )
        self._sandbox = sandbox

    @asynccontextmanager
    async def episode(
        self, tools: Sequence[dict[str, Any]] = ()
    ) -> AsyncIterator[RemoteEnvironment]:
        sandbox = open_sandbox(self._sandbox, uuid4().hex[:16])
        names = {tool["function"]["name"] for tool in tools}
        try:
            await self._in_thread(sandbox.start)
            yield ToolEnvironment(partial(self._call_in, sandbox), self._max_calls, names)
        finally:
            await self._in_thread(sandbox.stop)

    async def _call_in(
        self, sandbox: Sandbox, name: str, arguments: dict[str, Any]
    ) -> tuple[bool, str]:
        if name not in CALLS:
            return await self._call(name, arguments)
        try:
            inspect.signature(getattr(sandbox_tools, name)).bind(**arguments)
            texts = {key: str(value) for key, value in arguments.items()}
            text = await self._in_thread(partial(CALLS[name], sandbox, **texts))
        except (TypeError, SandboxFileError) as error:
            return False, str(error)
        return True, cut_text(text, self._max_characters)


def _shell(sandbox: Sandbox, command: str) -> str:
    result = sandbox.run(command)
    lines = [result.text.rstrip("\n")]
    if result.cut:
        lines.append(f"[cut: printed more than {sandbox.limits.output_bytes:,} bytes]")
    if result.timed_out:
        lines.append(f"[stopped: took more than {sandbox.limits.command_s:g} s]")
    elif result.exit_code:
        lines.append(f"[exit code {result.exit_code}]")
    return "\n".join(lines).strip("\n")


def _read_file(sandbox: Sandbox, path: str) -> str:
    return sandbox.read(path).decode(errors="replace")


def _write_file(sandbox: Sandbox, path: str, content: str) -> str:
    encoded = content.encode(errors="replace")
    sandbox.write(path, encoded)
    return f"{len(encoded):,} bytes written"


CALLS: dict[str, Callable[..., str]] = {
    "shell": _shell,
    "read_file": _read_file,
    "write_file": _write_file,
}


class SandboxAgentPool(AgentPool):
    """Processes that each run an agent's command line in a sandbox of its own."""

    def __init__(
        self,
        line: str,
        timeout_s: float,
        *,
        sandbox: SandboxConfig,
        memory_gib: float,
        processes: int,
    ) -> None:
        agent = cloudpickle.dumps(partial(run_command, line, sandbox, timeout_s))
        super().__init__(agent, timeout_s, memory_gib=memory_gib, processes=processes)
        self.setting = "rollout.agent_command"
        self._sandbox = sandbox

    async def run(self, record: dict[str, Any], variables: dict[str, str]) -> Score | None:
        try:
            return await super().run(record, variables)
        finally:  # its process may have been killed, and a container outlives it
            await self._in_thread(remove_left_over_sandboxes, self._sandbox)


def run_command(
    line: str,
    settings: SandboxConfig,
    timeout_s: float,
    record: dict[str, Any],
    base_url: str,
    api_key: str,
) -> Any:
    """Run an agent's command line in a sandbox, with the record on standard input. Returns its reward."""
    address = urlsplit(base_url)
    assert address.hostname and address.port
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    for name, value in variables.items():
        variables[name] = value.replace(
            f"//{address.netloc}", f"//127.0.0.1:{address.port}"
        )
    variables |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    limits = replace(limits_of(settings), command_s=timeout_s, output_bytes=LONGEST_OUTPUT)
    command = ["/bin/sh", "-c", WITH_ERRORS, ERRORS, *shlex.split(line)]
    gateway = (address.hostname, address.port)
    with open_sandbox(
        settings, uuid4().hex[:16], limits=limits, gateway=gateway
    ) as sandbox:
        result = sandbox.run(command, stdin=as_json(record).encode(), variables=variables)
        print(result.text, end="", flush=True)
        if result.timed_out:
            raise EpisodeError(
                f"the command took longer than rollout.agent_timeout_s={timeout_s:g}"
            )
        if result.exit_code:
            errors = sandbox.read(ERRORS).decode(errors="replace")
            error = hide_session_keys(error_in(errors.splitlines()))[:LONGEST_QUOTE]
            raise EpisodeError(
                f"Command {line!r} ended with exit code {result.exit_code}: {error}"
            )
    if result.cut:
        raise EpisodeError(
            f"its output has more than {LONGEST_OUTPUT:,} bytes, so its reward is not known"
        )
    lines = [text for text in result.output.splitlines() if text.strip()]
    return reward_in(lines[-1]) if lines else None
