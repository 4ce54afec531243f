"""Users' environments, each in a process of its own: one that raises, hangs or dies costs its episode, not the engine.

EnvironmentPool.episode --a process of the ForkPool--> RemoteEnvironment --reset, step--> Player
"""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import cloudpickle

from workers.environment import Observation, Text, encode_observation, encode_opening
from workers.errors import BallastError, EpisodeError
from workers.isolation.forks import Fork, ForkPool
from workers.isolation.process import RAISED, EndedError, named


class EpisodeEnvironment(Protocol):
    """An environment as an episode sees it, wherever it runs."""

    async def reset(self, record: dict[str, Any]) -> Text:
        """Raises EpisodeError."""

    async def step(self, response: str) -> Observation:
        """Raises EpisodeError."""


class RemoteEnvironment:
    """The environment of one episode, in a process of the pool."""

    def __init__(self, process: Fork, timeout_s: float) -> None:
        self._process, self._timeout_s = process, timeout_s

    async def reset(self, record: dict[str, Any]) -> Text:
        """Returns the text or messages to add to the record's prompt. Raises EpisodeError."""
        opening: Text = await self._call("reset", record)
        return opening

    async def step(self, response: str) -> Observation:
        """Returns the answer to a turn. Raises EpisodeError."""
        return Observation(**await self._call("step", response))

    async def _call(self, method: str, argument: Any) -> Any:
        try:
            answer = await self._process.call((method, argument), self._timeout_s)
        except TimeoutError:
            raise EpisodeError(f"{method} took more than reward.timeout_s={self._timeout_s:g} s") from None
        except EOFError:
            raise EpisodeError(f"{method} ended its process") from None
        except (OSError, ValueError) as error:  # ValueError: an answer that is too long, or not ours
            raise EpisodeError(f"{method} got no answer: {error}") from None
        if "failure" in answer:
            raise EpisodeError(answer["failure"])
        return answer["value"]


class EnvironmentPool:
    """Processes that play episodes of one environment class; as many as are played at a time."""

    def __init__(self, environment: bytes, timeout_s: float, *, silent: bool = False) -> None:
        """environment: the pickled class, which only its processes unpickle. timeout_s: seconds that one call may take.
        silent: whether their stderr is thrown away."""
        self._forks = ForkPool("workers.environment_process:Player", environment, silent=silent)
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[RemoteEnvironment]:
        """An environment in a process that plays nothing else meanwhile.

        Raises EpisodeError if none can be started. A process whose episode failed is not used again.
        """
        try:
            process = await self._forks.take()
        except EndedError:
            raise EpisodeError("the class of rollout.environment could not be imported in its process") from None
        except (OSError, ValueError) as error:
            raise EpisodeError(f"no process for the environment could be started: {error}") from None
        try:
            yield RemoteEnvironment(process, self._timeout_s)
        except BaseException:
            process.kill()
            raise
        self._forks.give_back(process)

    async def stop(self) -> None:
        """End all processes; another episode starts them again."""
        await self._forks.stop()


class Player:
    """In the process: answers `reset` and `step`; every `reset` makes a new environment."""

    def __init__(self, packed: bytes) -> None:
        self._class, self._environment = cloudpickle.loads(packed), None
        self._runner = asyncio.Runner()  # its event loop comes with the first run, after the fork

    def __call__(self, request: tuple[str, Any]) -> str:
        """JSON with the `value`, or the `failure` in words."""
        method, argument = request
        try:
            if method == "reset":
                self._environment = self._class()
            value = self._runner.run(_result(getattr(self._environment, method)(argument)))
            encode = encode_opening if method == "reset" else encode_observation
            return f'{{"value": {encode(value)}}}'
        except BallastError as error:
            return json.dumps({"failure": str(error)}, ensure_ascii=False)
        except RAISED as error:
            return json.dumps({"failure": f"{method} raised {named(error)}"}, ensure_ascii=False)


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
