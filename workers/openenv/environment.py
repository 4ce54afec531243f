"""The environment of a session: each call of the policy is an action, and the server rewards it."""

import json
import math
from functools import partial
from typing import Any, ClassVar

import cloudpickle

from workers.environment import Observation, Turn
from workers.errors import EpisodeError, quote
from workers.openenv.package_server import PackageServer
from workers.openenv.packages import absolute_name, is_url
from workers.openenv.server import InvalidActionError, ServerSession
from workers.user_code.task_sources import TASK, name_and_options

LISTED = "list_tools"
CALLED = "call_tool"
HIDDEN = ("metadata", "done", "reward")
"""Fields of an observation that the policy does not read."""


class OpenEnvEnvironment:
    """Plays one session. A turn without a call ends the episode. Base of a class with the server's URL."""

    url: ClassVar[str] = ""
    server: ClassVar[PackageServer | None] = None

    def __init__(self) -> None:
        explain_end = self.server.observe_end() if self.server else str
        self._session = ServerSession(self.url, explain_end)
        self._reward = 0.0

    def reset(self, record: dict[str, Any]) -> str:
        task = record[TASK]
        self._action = task["action"]
        self._session.open()
        answer = self._session.reset(task["reset"])
        if answer.get("done"):
            raise EpisodeError(f"{self.url}: the episode was done at its reset")
        self._reward = self._read_reward(answer)
        return _as_text(answer)

    def step(self, response: Turn) -> Observation:
        calls = getattr(response, "tool_calls", [])
        errors = getattr(response, "errors", [])
        if not calls and not errors:
            return self._observe([], done=True)
        if not calls:
            content = "\n".join(
                f"Error: {error}. Write the call again." for error in errors
            )
            return self._observe([{"role": "user", "content": content}])
        messages = []
        done = False
        for call in calls:
            name = call["function"]["name"]
            text, done = self._answer(name, call["function"]["arguments"])
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "name": name, "content": text}
            )
            if done:
                break
        return self._observe(messages, done=done)

    def close(self) -> None:
        self._session.close()

    def _answer(self, name: str, arguments: Any) -> tuple[str, bool]:
        """Take a call to the server. Returns its text, and whether the episode is done."""
        if not isinstance(arguments, dict):
            return "Error: the arguments are not a JSON object", False
        if self._action and name != self._action:
            return f"Error: there is no tool {name}. Use {self._action}.", False
        action = (
            arguments
            if self._action
            else {"type": CALLED, "tool_name": name, "arguments": arguments}
        )
        try:
            answer = self._session.step(action)
        except InvalidActionError as error:
            return f"Error: {error}", False
        self._reward += self._read_reward(answer)
        return _as_text(answer), bool(answer.get("done"))

    def _observe(
        self, messages: list[dict[str, Any]], *, done: bool = False
    ) -> Observation:
        reward = self._reward
        self._reward = 0.0
        return Observation(messages, reward=reward, done=done)

    def _read_reward(self, answer: dict[str, Any]) -> float:
        reward = answer.get("reward")
        if reward is None:
            return 0.0
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise EpisodeError(
                f"{self.url}: the reward {quote(reward)} is not a finite number"
            )
        return float(reward)


def pack_server_environment(text: str) -> bytes:
    """Return the class of environments of `openenv:URL`, pickled, or what starts a package's server."""
    name, _ = name_and_options(text)
    environment: Any = (
        type("ServerEnvironment", (OpenEnvEnvironment,), {"url": name})
        if is_url(name)
        else partial(serve_episodes, absolute_name(name))
    )
    packed: bytes = cloudpickle.dumps(environment)
    return packed


def serve_episodes(package: str) -> type[OpenEnvEnvironment]:
    """Start a package's server, which ends with this process. Returns the class of its environments."""
    server = PackageServer(package)
    return type(
        "PackageEnvironment", (OpenEnvEnvironment,), {"url": server.url, "server": server}
    )


def _as_text(answer: dict[str, Any]) -> str:
    """Return what the policy reads of an observation: a tool's result, its only field, or all fields."""
    fields = answer.get("observation") or {}
    if "tool_name" in fields:
        return _as_result(fields)
    shown = {name: value for name, value in fields.items() if name not in HIDDEN}
    if len(shown) == 1:
        (value,) = shown.values()
        return _write(value)
    return _write(shown) if shown else ""


def _as_result(fields: dict[str, Any]) -> str:
    if error := fields.get("error"):
        return f"Error: {error.get('message', error)}"
    result = fields.get("result")
    if isinstance(result, dict) and "content" in result:  # of MCP
        if result.get("data") is not None:
            return _write(result["data"])
        return "\n".join(str(part.get("text", "")) for part in result["content"])
    return _write(result)


def _write(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
