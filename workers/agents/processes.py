"""Users' agents: each session in its own process, which asks the policy at the engine's gateway.

AgentPool.run --fork--> Runner: run(record, base_url, api_key), or a command line
      |                    '--HTTP, OPENAI_BASE_URL--> gateway
      '-- twice a second: memory and number of its processes, all killed above a limit
"""

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path
from threading import Thread
from typing import IO, Any
from urllib.parse import urlsplit

import cloudpickle

from workers.batch.score import Score, as_score
from workers.errors import LONGEST_QUOTE, EpisodeError
from workers.user_code.environments import EnvironmentPool, call, result_of
from workers.user_code.process import (
    EXIT_SECONDS,
    LONGEST_ANSWER,
    LONGEST_LINE,
    Fork,
    end_with_parent,
)
from workers.user_code.session_keys import hide_session_keys

# Lines of a command's errors that are searched for the cause of its end.
LONGEST_TRACEBACK = 300
RUNNER = "workers.agents.processes:Runner"
WATCH_SECONDS = 0.5
GIB = 2**30
Session = tuple[dict[str, Any], dict[str, str]]
"""A record, and the environment variables of `session_variables`."""


def session_variables(base_url: str, session_url: str, key: str) -> dict[str, str]:
    """Return the environment variables by which stock clients find a session."""
    # Clients read either name, and users set either.
    hosts = [
        os.environ.get("NO_PROXY", ""),
        os.environ.get("no_proxy", ""),
        urlsplit(base_url).hostname,
    ]
    direct = ",".join(dict.fromkeys(filter(None, hosts)))
    openai = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key}
    # Its clients add /v1.
    anthropic = {"ANTHROPIC_BASE_URL": session_url, "ANTHROPIC_API_KEY": key}
    return (
        openai
        | anthropic
        | {"BALLAST_SESSION_URL": session_url, "NO_PROXY": direct, "no_proxy": direct}
    )


class AgentPool(EnvironmentPool):
    """Processes that run an agent, a new one for each session."""

    player = RUNNER
    closes = False

    def __init__(
        self, agent: bytes | str, timeout_s: float, *, memory_gib: float, processes: int
    ) -> None:
        """agent: a function, pickled, or a command line. memory_gib, processes: limits of a session."""
        super().__init__(agent, timeout_s)
        self.setting = (
            "rollout.agent_command" if isinstance(agent, str) else "rollout.agent"
        )
        self._memory_gib = memory_gib
        self._processes = processes
        self._running: dict[Fork, str] = {}  # why it was killed
        self._watching: asyncio.Task[None] | None = None

    async def run(self, record: dict[str, Any], variables: dict[str, str]) -> Score | None:
        """Return the agent's reward for a session, or None if it gives none. Raises EpisodeError.

        variables: see `session_variables`. Afterwards no process of the session is left.
        """
        process = await self._take_process()
        self._running[process] = ""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        request = ("run", (record, variables), "rollout.agent_timeout_s")
        try:
            answer = await self._in_thread(call, process, self._timeout_s, *request)
        except EpisodeError as failure:
            raise EpisodeError(self._running[process] or str(failure)) from None
        finally:
            del self._running[process]
            await self._in_thread(process.end)
        return None if answer is None else Score(response="", **answer)

    async def stop(self) -> None:
        for process in list(self._running):
            process.end()
        await super().stop()

    async def _watch(self) -> None:
        while self._running:
            await asyncio.sleep(WATCH_SECONDS)
            for process, reason in await self._in_thread(
                self._too_large, list(self._running)
            ):
                if process in self._running:
                    self._running[process] = f"its processes took {reason}"
                    await self._in_thread(process.end)

    def _too_large(self, running: list[Fork]) -> list[tuple[Fork, str]]:
        import psutil

        below = defaultdict(list)
        offenders = []
        for child in psutil.process_iter(["ppid"]):
            below[child.info["ppid"]].append(child.pid)
        for process in running:
            pids = [*below[process.pid]]
            used = list[float]()
            for pid in pids:  # which grows meanwhile
                pids += below[pid]
                with suppress(psutil.Error):
                    used.append(psutil.Process(pid).memory_info().rss / GIB)
            if sum(used) > self._memory_gib:
                offenders.append(
                    (
                        process,
                        f"more memory than rollout.agent_memory_gib={self._memory_gib:g}",
                    )
                )
            # Without zombies, which have no memory.
            if sum(map(bool, used)) > self._processes:
                offenders.append(
                    (process, f"more than rollout.agent_processes={self._processes}")
                )
        return offenders


# The code below runs in the process.


class Runner:
    """Run the agent for one session."""

    def __init__(self, agent: bytes | str) -> None:
        self._run = cloudpickle.loads(agent) if isinstance(agent, bytes) else command(agent)
        # Its event loop comes with the first run, after the fork.
        self._runner = asyncio.Runner()

    def __call__(self, request: tuple[str, Session], reply: Callable[[Any], None]) -> None:
        _, (record, variables) = request
        os.environ.update(variables)
        access = variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"]
        value = self._runner.run(result_of(self._run(record, *access)))
        score = None if value is None else as_score(value, "", source="the agent")
        reply(
            score and {"reward": score.reward, "parts": score.parts, "answer": score.answer}
        )


def command(line: str) -> Callable[..., Any]:
    """Return an agent that runs a command line: the record on standard input, the reward in the last line.

    A last line that is not `{"reward": number, ...}` gives no reward.
    """

    def run(record: dict[str, Any], base_url: str, api_key: str) -> Any:
        with tempfile.TemporaryFile("w+") as record_file:
            record_file.write(as_json(record))
            record_file.seek(0)
            process = subprocess.Popen(
                shlex.split(line),
                stdin=record_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=end_with_parent,
            )
        last_line: list[bytes] = []  # in parts
        last_errors = deque[str](maxlen=LONGEST_TRACEBACK)
        readers = [
            Thread(target=_show, args=(process.stdout, last_line), daemon=True),
            Thread(target=_show_errors, args=(process.stderr, last_errors), daemon=True),
        ]
        for reader in readers:
            reader.start()
        code = process.wait()
        for reader in readers:
            # Longer only if a process that it left behind holds the stream.
            reader.join(EXIT_SECONDS)
        if code:
            end = str(subprocess.CalledProcessError(code, line)).rstrip(".")
            error = hide_session_keys(error_in(list(last_errors)))[:LONGEST_QUOTE]
            raise EpisodeError(
                (f"{end}: {error}" if error else end) + _shadowing_file(line, error)
            )
        return reward_in(b"".join(last_line))

    return run


def reward_in(last_line: bytes) -> Any:
    """Return the reward that a command printed last, or None. Raises EpisodeError if the line is too long."""
    if len(last_line) > LONGEST_ANSWER:
        raise EpisodeError(
            f"the last line of its output, its reward, has more than {LONGEST_ANSWER:,} bytes"
        )
    with suppress(ValueError):
        value = json.loads(last_line)
        return value if isinstance(value, dict) and "reward" in value else None


def _show(stream: IO[bytes], last_line: list[bytes]) -> None:
    """Show a command's output as it comes, and keep its last line that is not empty, or a bit too
    much of it.
    """
    parts: list[bytes] = []
    while part := stream.readline(LONGEST_LINE):
        sys.stdout.write(part.decode(errors="replace"))
        sys.stdout.flush()
        if sum(map(len, parts)) <= LONGEST_ANSWER:
            parts.append(part)
        if any(text.strip() for text in parts):
            last_line[:] = parts
        if part.endswith(b"\n"):
            parts = []


def _show_errors(stream: IO[bytes], last_lines: deque[str]) -> None:
    """Show a command's errors as they come, and keep the last lines."""
    while part := stream.readline(LONGEST_LINE):
        text = part.decode(errors="replace")
        sys.stderr.write(text)
        sys.stderr.flush()
        last_lines.append(text)


def error_in(lines: list[str]) -> str:
    """Return the error of the last traceback, whose text may have further lines, or else the last line."""
    lines = [line for line in lines if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (")]
    if not starts:
        return lines[-1].strip() if lines else ""
    # Behind the lines of code.
    error = dropwhile(lambda line: line[0].isspace(), lines[starts[-1] + 1 :])
    return " ".join(" ".join(error).split())


def _shadowing_file(line: str, error: str) -> str:
    """Name a file beside the command's script that stands in the place of the module of an import error."""
    match = re.search(r"(?:module|from) '(\w+)[.\w]*'", error)
    module = match[1] if match else ""
    for script in [Path(word) for word in shlex.split(line) if word.endswith(".py")]:
        file = script.with_name(f"{module}.py")
        if module and file.is_file() and file != script:
            return f" ({file} shadows the package {module}. Rename it)"
    return ""


def as_json(record: dict[str, Any]) -> str:
    """Write a record. Arrays become lists, other objects texts."""
    return json.dumps(
        record, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v)
    )
