"""Users' tools: the functions of rollout.tools, which the policy calls. Each call runs in a separate process.

    Turn --calls--> ToolEnvironment --name, arguments--> Caller in a fork --text--> messages of role tool
      '-- without a call: the episode ends, and the reward functions score it

Whatever goes wrong is told to the policy: no call fails the sample.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import cloudpickle

from workers.batch.score import TOOL_PARTS
from workers.environment import Observation, Text, Turn
from workers.errors import EpisodeError, describe_error
from workers.user_code.environments import EnvironmentPool, RemoteEnvironment, result_of
from workers.user_code.process import RAISED

CALLER = "workers.user_code.tools:Caller"
ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")


class ToolPool(EnvironmentPool):
    """Processes that call tools, one call at a time each."""

    setting = "rollout.tools"
    player = CALLER
    closes = False

    def __init__(
        self, tools: bytes, timeout_s: float, *, max_calls: int, max_characters: int
    ) -> None:
        """tools: functions by name, pickled. max_calls: of a turn. max_characters: of a result."""
        super().__init__(tools, timeout_s)
        self._max_calls = max_calls
        self._max_characters = max_characters

    @asynccontextmanager
    async def episode(
        self, tools: Sequence[dict[str, Any]] = ()
    ) -> AsyncIterator[RemoteEnvironment]:
        """tools: schemas of those that the prompt offers."""
        yield ToolEnvironment(
            self._call, self._max_calls, {tool["function"]["name"] for tool in tools}
        )

    async def _call(self, name: str, arguments: dict[str, Any]) -> tuple[bool, str]:
        """Return whether the call succeeded, and its result or what was wrong, cut to the limit."""
        try:
            async with self.process() as call:
                succeeded, text = await call(name, (arguments, self._max_characters))
                return bool(succeeded), str(text)
        except EpisodeError as error:
            return False, str(error)


class ToolEnvironment(RemoteEnvironment):
    """The environment of an episode whose answers are results of tools. Its reward is 0."""

    def __init__(
        self,
        call: Callable[[str, Any], Awaitable[tuple[bool, str]]],
        max_calls: int,
        offered: set[str],
    ) -> None:
        super().__init__(call)
        self._max_calls = max_calls
        self._offered = offered
        self._parts = dict.fromkeys(TOOL_PARTS, 0.0)

    async def reset(self, record: dict[str, Any]) -> Text:
        return ""

    async def step(self, response: Turn) -> Observation:
        calls = response.tool_calls
        errors = [f"Error: {error}. Write the call again." for error in response.errors]
        if not calls and not errors:
            return Observation(done=True, parts=self._parts)
        start = time.monotonic()
        results = await asyncio.gather(*(self._result(*call) for call in enumerate(calls)))
        spent = time.monotonic() - start
        failed = sum(not succeeded for succeeded, _ in results) + len(errors)
        amounts = (len(calls) + len(errors), failed, spent)
        self._parts = {
            name: self._parts[name] + amount
            for name, amount in zip(TOOL_PARTS, amounts, strict=True)
        }
        messages = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": text if succeeded else f"Error: {text}",
            }
            for call, (succeeded, text) in zip(calls, results, strict=True)
        ]
        if not calls:  # many templates refuse an answer to no call
            messages = [{"role": "user", "content": "\n".join(errors)}]
        else:
            messages[-1]["content"] = "\n".join([messages[-1]["content"], *errors])
        return Observation(messages, parts=self._parts)

    async def _result(self, position: int, call: dict[str, Any]) -> tuple[bool, str]:
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        if position >= self._max_calls:
            return False, f"at most {self._max_calls} calls of a turn are made"
        if name not in self._offered:
            return (
                False,
                f"there is no tool {name}. Use one of: {', '.join(sorted(self._offered))}",
            )
        if not isinstance(arguments, dict):
            return False, "the arguments are not a JSON object"
        return await self._call(name, arguments)


def plain_value(value: Any) -> str:
    """Write a value that JSON has no form for. Raises TypeError if its text is a place in memory (a
    generator's).
    """
    text = str(value)
    if ADDRESS.search(text):
        raise TypeError(
            f"the tool returned a value of type {type(value).__name__}, which is neither text nor JSON"
        )
    return text


def cut_text(text: str, longest: int) -> str:
    """Return the beginning of a result, and how much is missing."""
    rest = len(text) - longest
    return text if rest <= 0 else f"{text[:longest]} [cut: {rest:,} more characters]"


class Caller:
    """Call tools in the process."""

    def __init__(self, packed: bytes) -> None:
        self._tools: dict[str, Callable[..., Any]] = cloudpickle.loads(packed)
        # Its event loop comes with the first run, after the fork.
        self._runner = asyncio.Runner()

    def __call__(
        self, request: tuple[str, tuple[dict[str, Any], int]], reply: Callable[[Any], None]
    ) -> None:
        name, (arguments, longest) = request
        try:
            value = self._runner.run(result_of(self._tools[name](**arguments)))
            text = (
                value
                if isinstance(value, str)
                else json.dumps(value, ensure_ascii=False, default=plain_value)
            )
        except RAISED as error:
            reply((False, describe_error(error)))
            return
        reply((True, cut_text(text, longest)))
