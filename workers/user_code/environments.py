"""Users' environments, each in its own process: a failure costs one episode, not the engine.

EnvironmentPool.episode --fork of a process that imported it--> RemoteEnvironment --reset, step--> Player

An episode's end closes the environment: by a request, or by SIGTERM if the episode failed or was cancelled,
when its process may be busy.
"""

import asyncio
import inspect
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import cloudpickle

from workers.batch.score import check_parts
from workers.environment import Observation, Text, Turn, as_observation, as_opening
from workers.errors import BallastError, ConfigError, EpisodeError, describe_error
from workers.user_code.process import (
    RAISED,
    Fork,
    NoAnswerError,
    UserProcess,
)

PLAYER = "workers.user_code.environments:Player"
PREPARE_SECONDS = 600.0  # to import an environment, or to install its package on this node
MOST_EPISODES = 4096  # threads, each of which waits for a process


class RemoteEnvironment:
    """The environment of one episode, in its process. Its methods raise EpisodeError."""

    def __init__(self, call: Callable[[str, Any], Any]) -> None:
        self._call = call

    async def reset(self, record: dict[str, Any]) -> Text:
        opening: Text = await self._call("reset", record)
        return opening

    async def step(self, response: Turn) -> Observation:
        return Observation(**await self._call("step", response))

    async def solve(self) -> Observation | None:
        """Play the environment's own solution. Returns None if the class has no `solve`."""
        solved = await self._call("solve", None)
        return None if solved is None else Observation(**solved)

    async def close(self) -> None:
        await self._call("close", None)


class EnvironmentPool:
    """Processes that play episodes of one environment class, one each."""

    setting = "rollout.environment"
    player = PLAYER
    closes = True
    """Whether the end of a process waits until its environment is closed."""

    def __init__(self, environment: bytes | str, timeout_s: float) -> None:
        self._environment = environment
        self._timeout_s = timeout_s
        self._source: UserProcess | None = None
        self._starting = Lock()
        self._idle: list[Fork] = []
        # Threads are kept: a process ends with the thread that started it.
        self._threads = ThreadPoolExecutor(MOST_EPISODES)

    @asynccontextmanager
    async def episode(
        self, tools: Sequence[dict[str, Any]] = ()
    ) -> AsyncIterator[RemoteEnvironment]:
        """Reserve a process for one episode. Raises EpisodeError if none can be started. tools: for
        `ToolPool`.
        """
        async with self.process() as call:
            environment = RemoteEnvironment(call)
            yield environment
            try:
                await environment.close()
            except EpisodeError as error:
                sys.stderr.write(f"{self.setting}: {error}. The sample keeps its reward.\n")

    @asynccontextmanager
    async def process(self) -> AsyncIterator[Callable[[str, Any], Awaitable[Any]]]:
        """Reserve a process, and yield what calls it. Raises EpisodeError if none can be started."""
        process = await self._take_process()
        try:
            yield partial(self._in_thread, call, process, self._timeout_s)
        except BaseException:
            await self._in_thread(process.end)
            raise
        self._idle.append(process)

    async def _take_process(self) -> Fork:
        try:
            return await self._in_thread(self._take)
        except NoAnswerError as error:
            raise EpisodeError(f"the import of {self.setting} {error}") from None
        except ConfigError as error:  # what prepares the process has failed
            raise EpisodeError(f"{self.setting}: {error}") from None
        except OSError as error:
            raise EpisodeError(
                f"no process for {self.setting} could be started: {error}"
            ) from None

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, function, *arguments
        )

    def _take(self) -> Fork:
        with self._starting:
            while self._idle:
                if (process := self._idle.pop()).alive:
                    return process
                process.end()
            if self._source is None or not self._source.alive:
                self._end_source()
                self._source = UserProcess(self.player, self._environment)
                self._source.receive(PREPARE_SECONDS)
            return self._source.fork(closes=self.closes)

    async def stop(self) -> None:
        """End all processes. Another episode starts new ones."""
        while self._idle:
            self._idle.pop().end()
        await self._in_thread(self._end_source)

    def _end_source(self) -> None:
        source = self._source
        self._source = None
        if source is not None:
            source.end()  # this also ends its forks


@dataclass(frozen=True)
class Answered:
    opening: Text
    observation: Observation


def try_environment(packed: bytes, record: dict[str, Any], timeout_s: float) -> Answered:
    """Answer a record with an empty response. Raises ConfigError."""
    source = UserProcess(PLAYER, packed, quiet=True)
    try:
        source.receive(PREPARE_SECONDS)
        process = source.fork(closes=True)  # as in a run
        try:
            opening = call(process, timeout_s, "reset", record)
            observation = Observation(**call(process, timeout_s, "step", Turn("")))
        finally:
            process.end()
    except (NoAnswerError, EpisodeError, ConfigError) as error:
        failure = (
            f"the import {error}"
            if isinstance(error, NoAnswerError)
            else str(error).rstrip(".")
        )
        raise ConfigError(
            f"rollout.environment failed on the first record and an empty response: {failure}."
        ) from None
    finally:
        source.end()
    check_parts((), observation.parts)
    return Answered(opening, observation)


def call(
    process: Fork,
    timeout_s: float,
    method: str,
    argument: Any,
    setting: str = "reward.timeout_s",
) -> Any:
    try:
        process.send((method, argument))
        return process.receive(timeout_s, setting)
    except NoAnswerError as error:
        raise EpisodeError(f"{method} {error}") from None
    except BallastError as error:
        raise EpisodeError(str(error)) from None


class EndOfEpisode(SystemExit):
    """SIGTERM came while the environment's code ran. asyncio raises a SystemExit at once."""


class Player:
    """Answer `reset`, `step` and `close` in the process. Every `reset` makes a new environment."""

    def __init__(self, packed: bytes) -> None:
        environment = cloudpickle.loads(packed)
        # A function prepares this process first, such as with a server for all episodes.
        self._class = environment if isinstance(environment, type) else environment()
        self._environment: Any = None
        # Its event loop comes with the first run, after the fork.
        self._runner = asyncio.Runner()
        self._is_busy = False

    def __call__(self, request: tuple[str, Any], reply: Callable[[Any], None]) -> None:
        self._is_busy = True
        try:
            reply(self._answer(*request))
        except EndOfEpisode:
            self._end()
        finally:
            self._is_busy = False

    def _answer(self, method: str, argument: Any) -> Any:
        if method == "close":
            return self._close()
        if method == "solve":
            return self._solve()
        if method == "reset":
            self._close()
            if hasattr(self._class, "close"):
                signal.signal(signal.SIGTERM, self._stop)
            self._environment = self._class()
        value = self._runner.run(result_of(getattr(self._environment, method)(argument)))
        return as_opening(value) if method == "reset" else as_observation(value)

    def _solve(self) -> dict[str, Any] | None:
        solve = getattr(self._environment, "solve", None)
        return (
            None if solve is None else as_observation(self._runner.run(result_of(solve())))
        )

    def _close(self) -> None:
        environment = self._environment
        self._environment = None
        if hasattr(environment, "close"):
            self._runner.run(result_of(environment.close()))

    def _stop(self, signum: int, frame: Any) -> None:
        if self._is_busy:
            raise EndOfEpisode
        self._end()

    def _end(self) -> None:
        """Close the environment, whose `reset` or `step` may have been interrupted, and exit."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            self._runner.run(_cancel_tasks())
            self._close()
        except RAISED as error:
            sys.stderr.write(f"rollout.environment: close raised {describe_error(error)}\n")
        finally:
            sys.stderr.flush()
            os._exit(0)


async def _cancel_tasks() -> None:
    """Cancel what an interrupted coroutine has left, which would go on while the environment closes."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def result_of(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
