"""The environment of a Harbor task: the policy's commands run in the task's sandbox, and then its tests."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from workers.environment import Observation, Turn
from workers.errors import EpisodeError
from workers.harbor.task_folders import Layout, read_layout, read_task
from workers.sandbox.kinds import limits_of, open_sandbox, run_settings
from workers.sandbox.protocol import Sandbox, SandboxFileError
from workers.user_code.task_sources import TASK

LONGEST_OUTPUT = 16_384
REWARDS = "/logs/verifier/reward"
SCRIPT = "if command -v bash >/dev/null; then exec bash {0}; else exec sh {0}; fi"


class HarborEnvironment:
    """Plays one task. A turn without a call ends the episode, or one after the agent's time."""

    def __init__(self) -> None:
        self._sandbox: Sandbox | None = None

    def reset(self, record: dict[str, Any]) -> str:
        settings = run_settings()
        task = read_task(Path(record[TASK]))
        kind = settings.kind.partition(":")[0]
        layout = Layout("", (), {})
        if kind == "bubblewrap":
            layout = read_layout(task.folder)
        else:
            settings = replace(settings, kind=f"{kind}:{task.image}")
        longest = max(settings.command_timeout_s, task.test_seconds, task.agent_seconds)
        limits = replace(limits_of(settings), command_s=longest)
        self._task = task
        self._layout = layout
        self._command_seconds = settings.command_timeout_s
        self._sandbox = open_sandbox(settings, task.folder.name, limits=limits)
        self._sandbox.start()
        self._write_files()
        self._end = time.monotonic() + task.agent_seconds
        return ""

    def step(self, response: Turn) -> Observation:
        calls = getattr(response, "tool_calls", [])
        errors = getattr(response, "errors", [])
        if time.monotonic() < self._end:
            if calls:
                return Observation([self._answer(call) for call in calls])
            if errors:
                content = "\n".join(
                    f"Error: {error}. Write the call again." for error in errors
                )
                return Observation([{"role": "user", "content": content}])
        return self._score()

    def solve(self) -> Observation:
        """Run the oracle's `solution/solve.sh` and the tests. Raises EpisodeError."""
        sandbox = self._running()
        if not (self._task.folder / "solution" / "solve.sh").is_file():
            raise EpisodeError(f"{self._task.folder} has no solution/solve.sh")
        _write_folder(sandbox, self._task.folder / "solution", "/solution")
        self._run(SCRIPT.format("/solution/solve.sh"), longest=self._task.agent_seconds)
        return self._score()

    def close(self) -> None:
        sandbox = self._sandbox
        self._sandbox = None
        if sandbox is not None:
            sandbox.stop()

    def _running(self) -> Sandbox:
        if self._sandbox is None:
            raise EpisodeError("the sandbox of the task is not open")
        return self._sandbox

    def _write_files(self) -> None:
        sandbox = self._running()
        for source, inside in self._layout.copies:
            _write_folder(sandbox, Path(source), inside)
        place = self._layout.folder
        sandbox.run(["mkdir", "-p", "/logs/verifier", "/logs/agent", place or "/logs"])

    def _run(self, command: str, longest: float = 0.0) -> tuple[int, str]:
        """longest: seconds, or 0 for those of a command."""
        seconds = min(
            longest or self._command_seconds, max(1.0, self._end - time.monotonic())
        )
        result = self._running().run(
            command,
            folder=self._layout.folder,
            variables=self._layout.variables,
            timeout_s=seconds,
        )
        text = result.text[:LONGEST_OUTPUT]
        if result.timed_out:
            text += f"\n[stopped: took more than {seconds:g} s]"
        return result.exit_code, text

    def _answer(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        answer = {"role": "tool", "tool_call_id": call["id"], "name": function["name"]}
        if (
            function["name"] != "shell"
            or not isinstance(arguments, dict)
            or set(arguments) != {"command"}
        ):
            return answer | {
                "content": "Error: there is one tool, shell, with one argument, command."
            }
        code, text = self._run(str(arguments["command"]))
        mark = f"\n[exit code {code}]" if code else ""
        return answer | {"content": text.rstrip("\n") + mark}

    def _score(self) -> Observation:
        """Run the tests, which the policy has not seen, and read the reward."""
        sandbox = self._running()
        try:
            sandbox.end_commands()  # a process that the policy left could write the reward
            sandbox.run(["rm", "-rf", "/tests", "/logs/verifier"])
            sandbox.run(["mkdir", "-p", "/logs/verifier"])
            _write_folder(sandbox, self._task.folder / "tests", "/tests")
            result = sandbox.run(
                SCRIPT.format("/tests/test.sh"),
                folder=self._layout.folder,
                variables=self._layout.variables,
                timeout_s=self._task.test_seconds,
            )
            if result.timed_out:
                raise EpisodeError(
                    f"{self._place} took longer than {self._task.test_seconds:g} s"
                )
            parts = self._read_rewards(sandbox)
        finally:
            self.close()
        reward = parts.pop("reward")
        return Observation(reward=reward, done=True, parts=parts)

    @property
    def _place(self) -> str:
        return str(self._task.folder / "tests" / "test.sh")

    def _read_rewards(self, sandbox: Sandbox) -> dict[str, float]:
        for suffix in ("json", "txt"):
            try:
                content = sandbox.read(f"{REWARDS}.{suffix}")
            except SandboxFileError:
                continue
            return self._parse(content, f"{REWARDS}.{suffix}")
        raise EpisodeError(f"{self._place} wrote neither {REWARDS}.txt nor {REWARDS}.json")

    def _parse(self, content: bytes, file: str) -> dict[str, float]:
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            value = None
        rewards = value if isinstance(value, dict) else {"reward": value}
        numbers = {name: number for name, number in rewards.items() if _is_number(number)}
        if len(numbers) != len(rewards) or "reward" not in numbers:
            raise EpisodeError(
                f"{self._place}: {file} has no finite number as reward: {content[:80]!r}"
            )
        return {name: float(number) for name, number in numbers.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _write_folder(sandbox: Sandbox, source: Path, inside: str) -> None:
    files = (
        [source]
        if source.is_file()
        else sorted(path for path in source.rglob("*") if path.is_file())
    )
    for file in files:
        path = inside if source.is_file() else f"{inside}/{file.relative_to(source)}"
        sandbox.write(path, file.read_bytes())
