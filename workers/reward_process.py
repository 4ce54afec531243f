"""Users' reward functions in a process of their own: one that raises, hangs or dies costs a sample, not the run.

    RewardProcess.run(calls) --calls--> serve(): functions, sample by sample --(number, score)--> RewardProcess
            |                                                                                  |
            +-- nothing within timeout_s, or the process is gone: started again for the rest <-+

The process imports neither Ray nor torch, so it starts in a moment.
"""

import asyncio
import inspect
import io
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

import cloudpickle

from workers.errors import DataError, quoted
from workers.isolation.process import RAISED, START_SECONDS, Channel, EndedError, Process, named, reply
from workers.score import Score, as_score, weighted

RAW = "response_raw"  # stands among the columns: the response with its special tokens, for functions that name it


@dataclass(frozen=True)
class RewardFunction:
    """A user's function as drivers and actors hold it: `packed` by cloudpickle, and unpickled by RewardProcess alone.

    name: the short one, that metrics carry. weight: in the reward. It is called with `response` (a text) and the
    `columns` of the sample's record that it takes by name; or, if it takes `responses`, once with lists of all of
    these. It may be a coroutine function.
    """

    name: str
    weight: float
    packed: bytes
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Unpacked:
    """A RewardFunction in its process."""

    name: str
    weight: float
    function: Callable[..., Any]
    columns: tuple[str, ...]

    @classmethod
    def of(cls, found: RewardFunction) -> "Unpacked":
        """Unpickle, which may import what the function's module imported."""
        return cls(found.name, found.weight, cloudpickle.loads(found.packed), found.columns)

    @property
    def batched(self) -> bool:
        """True if it takes all samples at once."""
        return "responses" in inspect.signature(self.function).parameters


@dataclass(frozen=True)
class Call:
    """One sample to score; `columns` has at least what the functions take."""

    number: int
    response: str
    columns: Mapping[str, Any]


class RewardProcess:
    """Runs reward functions on samples, in a process that is started again whenever a sample ends it."""

    def __init__(
        self, functions: Sequence[RewardFunction], *, timeout_s: float, concurrency: int, silent: bool = False
    ) -> None:
        """timeout_s: seconds that one call may take. concurrency: samples under way at a time, of coroutine functions.
        silent: whether what the functions write to stderr is thrown away."""
        self._functions, self._timeout_s, self._concurrency = list(functions), timeout_s, concurrency
        self._errors: TextIO | None = io.StringIO() if silent else None
        self._one_at_a_time = False  # the process says so when it is ready
        self._process: Process | None = None

    def run(self, calls: Sequence[Call]) -> dict[int, Score]:
        """A score for every call, by number, or with the reason in `failure`. Never raises for what a function does."""
        scores: dict[int, Score] = {}
        groups = deque([list(calls)] if calls else [])
        while groups:
            group = groups.popleft()
            done, reason = self._try(group)
            scores |= done
            left = [call for call in group if call.number not in done]
            if len(group) == 1 and left:
                scores[left[0].number] = Score(0.0, left[0].response, failure=reason)
            elif left:
                groups.extendleft(reversed(self._regrouped(left)))
        return scores

    def _regrouped(self, left: list[Call]) -> list[list[Call]]:
        """The culprit alone: the first, where samples are scored in their order; else it may be any of them."""
        if self._one_at_a_time and len(left) > 1:
            return [left[:1], left[1:]]
        return [[call] for call in left]

    def _try(self, group: list[Call]) -> tuple[dict[int, Score], str]:
        """Scores until all are there, or until the process ends or stays silent, and why."""
        responses = {call.number: call.response for call in group}
        done: dict[int, Score] = {}
        try:
            process = self._started()
            process.send(group)
            while len(done) < len(group):
                # The process itself ends what takes too long, unless it hangs: then it is late by more than a second.
                number, score = process.receive(self._timeout_s + 1.0)
                done[number] = Score(response=responses[number], **score)
        except TimeoutError:
            self.stop()
            return done, f"it took more than reward.timeout_s={self._timeout_s:g} s"
        except EndedError as end:
            self.stop()
            return done, f"it ended its process ({end})"
        return done, ""

    def _started(self) -> Process:
        if self._process is None:
            process = self._process = Process("workers.reward_process:serve", errors=self._errors)
            process.send((self._functions, self._timeout_s, self._concurrency))
            try:
                self._one_at_a_time = process.receive(START_SECONDS)
            except TimeoutError:
                raise EndedError(process.end()) from None
        return self._process

    def stop(self) -> None:
        """End the process; `run` starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.end()


# The functions below run in the process.


def serve(channel: Channel) -> None:
    """Score samples until the other side is gone."""
    packed, timeout_s, concurrency = channel.recv()
    functions = [Unpacked.of(function) for function in packed]
    reply(channel, not any(f.batched or inspect.iscoroutinefunction(f.function) for f in functions))
    loop = asyncio.new_event_loop()
    with suppress(EOFError):
        while True:
            calls = channel.recv()
            loop.run_until_complete(_score_all(channel, functions, calls, timeout_s, concurrency))


class _FunctionError(Exception):
    """The reason why a function returned no score."""


async def _score_all(
    channel: Channel, functions: list[Unpacked], calls: list[Call], timeout_s: float, concurrency: int
) -> None:
    batches = {f.name: await _score_batch(f, calls, timeout_s) for f in functions if f.batched}
    room = asyncio.Semaphore(concurrency)

    async def score(position: int, call: Call) -> None:
        async with room:
            given = {name: values[position] for name, values in batches.items()}
            scored = vars(await _score(functions, call, given, timeout_s))
            reply(channel, (call.number, {name: value for name, value in scored.items() if name != "response"}))

    await asyncio.gather(*(score(position, call) for position, call in enumerate(calls)))


async def _score(functions: list[Unpacked], call: Call, given: dict[str, Any], timeout_s: float) -> Score:
    """The sample's score over all functions; `given` has the values of the batched ones."""
    scores: dict[str, Score] = {}
    for function in functions:
        try:
            value = given[function.name] if function.batched else await _call(function, call, timeout_s)
            if isinstance(value, _FunctionError):
                raise value
            scores[function.name] = as_score(value, call.response)
        except (_FunctionError, DataError) as error:
            return Score(0.0, call.response, failure=f"{function.name}: {error}")
    return weighted(scores, {function.name: function.weight for function in functions}, call.response)


async def _score_batch(function: Unpacked, calls: list[Call], timeout_s: float) -> list[Any]:
    """One value or _FunctionError for each call; where the whole batch fails, each call is tried alone."""
    columns = {name: [call.columns.get(name) for call in calls] for name in function.columns}
    try:
        values = await _result(function, {"responses": [call.response for call in calls]} | columns, timeout_s)
        if not isinstance(values, Sequence) or len(values) != len(calls):
            raise _FunctionError(f"returned {quoted(values)} for {len(calls)} responses")
        return list(values)
    except _FunctionError as error:
        if len(calls) == 1:
            return [error]
    return [(await _score_batch(function, [call], timeout_s))[0] for call in calls]


async def _call(function: Unpacked, call: Call, timeout_s: float) -> Any:
    columns = {name: call.columns[name] for name in function.columns if name in call.columns}
    return await _result(function, {"response": call.response} | columns, timeout_s)


async def _result(function: Unpacked, arguments: dict[str, Any], timeout_s: float) -> Any:
    try:
        value = function.function(**arguments)
        if not inspect.isawaitable(value):
            return value
        # Not wait_for: it makes a task, and what of RAISED is no Exception would end the loop from there.
        async with asyncio.timeout(timeout_s):
            return await value
    except TimeoutError:
        raise _FunctionError(f"took more than reward.timeout_s={timeout_s:g} s") from None
    except RAISED as error:
        raise _FunctionError(f"raised {named(error)}") from None
