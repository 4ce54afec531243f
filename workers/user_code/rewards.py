"""Users' reward functions in their own process: a failure costs a sample, not the run.

    RewardProcess.run(calls) --calls--> Scorer: functions, sample by sample --(number, score)--> RewardProcess
            |                                                                                  |
            +-- nothing within timeout_s, or the process is gone: started again for the rest <-+

The process imports neither Ray nor torch, so it starts in a moment.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable, signature
from typing import Any

import cloudpickle

from workers.batch.score import RAW, Score, as_score, check_parts, weigh_scores
from workers.errors import BallastError, ConfigError, DataError, describe_error, quote
from workers.user_code.process import RAISED, START_SECONDS, NoAnswerError, UserProcess
from workers.user_code.verl_form import is_verl_form, verl_arguments

# These stand among a record's columns, for functions that name them.
MESSAGES = "messages"  # of an episode: the chat messages of prompt, policy and environment


@dataclass(frozen=True)
class RewardFunction:
    """A user's function or coroutine function, unpickled only in the process. name: for metrics. weight: in
    the reward.

    It gets `response`, a text, and the record's `columns`. With a parameter `responses`, lists of all samples
    at once. With `solution_str`, verl's arguments.
    """

    name: str
    weight: float
    packed: bytes
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """One sample to score. columns: at least the functions' parameters."""

    number: int
    response: str
    columns: Mapping[str, Any]


class RewardProcess:
    """Run reward functions on samples. A sample that ends the process restarts it."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        timeout_s: float,
        concurrency: int,
        quiet: bool = False,
    ) -> None:
        """timeout_s: of one call. concurrency: of coroutine functions. quiet: hide the functions' stderr."""
        self._functions = list(functions)
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._quiet = quiet
        self._process: UserProcess | None = None

    def run(self, calls: Sequence[Call]) -> dict[int, Score]:
        """Return a score for every call, by number. Failures are in `failure`, never raised."""
        scores: dict[int, Score] = {}
        if len(calls) > 1:
            self._try(calls, scores)
        for call in calls:  # alone, because any call left may have ended the process
            if call.number not in scores and (reason := self._try([call], scores)):
                scores[call.number] = Score(0.0, call.response, failure=reason)
        return scores

    def _try(self, calls: Sequence[Call], scores: dict[int, Score]) -> str:
        responses = {call.number: call.response for call in calls}
        try:
            process = self._ensure_started()
            process.send(calls)
            for _ in calls:
                # The process itself ends a coroutine that takes too long. Only a hanging call is late by a
                # second.
                number, score = process.receive(
                    self._timeout_s, "reward.timeout_s", late_s=1.0
                )
                scores[number] = Score(response=responses[number], **score)
        except (NoAnswerError, BallastError) as error:
            self.stop()
            return f"it {error}"
        return ""

    def _ensure_started(self) -> UserProcess:
        if self._process is None:
            settings = (self._functions, self._timeout_s, self._concurrency)
            self._process = UserProcess(
                "workers.user_code.rewards:Scorer", *settings, quiet=self._quiet
            )
            self._process.receive(START_SECONDS)
        return self._process

    def stop(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.end()


def try_rewards(
    functions: Sequence[RewardFunction], record: Mapping[str, Any], timeout_s: float
) -> Score:
    """Score an empty response to a record. Raises ConfigError, because a function must score any text.

    Raises DataError for a reserved name of a part.
    """
    process = RewardProcess(functions, timeout_s=timeout_s, concurrency=1, quiet=True)
    try:
        score = process.run([Call(0, "", {**record, RAW: ""})])[0]
    finally:
        process.stop()
    if score.failure:
        failure = score.failure.rstrip(".")
        raise ConfigError(
            f"reward.function failed on the first record and an empty response: {failure}."
        )
    check_parts(score.parts)
    return score


# The functions below run in the process.


class Scorer:
    def __init__(
        self, functions: list[RewardFunction], timeout_s: float, concurrency: int
    ) -> None:
        self._functions = {
            function: cloudpickle.loads(function.packed) for function in functions
        }
        parameters = {
            reward_function: list(signature(function).parameters)
            for reward_function, function in self._functions.items()
        }
        self._batched = [
            function for function, names in parameters.items() if "responses" in names
        ]
        self._verl_names = {
            function: names for function, names in parameters.items() if is_verl_form(names)
        }
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._room = asyncio.Semaphore(concurrency)

    def __call__(self, calls: list[Call], reply: Callable[[Any], None]) -> None:
        self._loop.run_until_complete(self._score_all(calls, reply))

    async def _score_all(self, calls: list[Call], reply: Callable[[Any], None]) -> None:
        batches = {
            function: await self._score_batch(function, calls) for function in self._batched
        }

        async def score(position: int, call: Call) -> None:
            async with self._room:
                scored = vars(
                    await self._score(
                        call,
                        {
                            function: values[position]
                            for function, values in batches.items()
                        },
                    )
                )
                reply(
                    (
                        call.number,
                        {
                            name: value
                            for name, value in scored.items()
                            if name != "response"
                        },
                    )
                )

        await asyncio.gather(
            *(score(position, call) for position, call in enumerate(calls))
        )

    async def _score(self, call: Call, batched: dict[RewardFunction, Any]) -> Score:
        scores: dict[str, Score] = {}
        for function in self._functions:
            try:
                value = (
                    batched[function]
                    if function in batched
                    else await self._score_one(function, call)
                )
                if isinstance(value, _FunctionError):
                    raise value
                scores[function.name] = as_score(value, call.response)
            except (_FunctionError, DataError) as error:
                return Score(0.0, call.response, failure=f"{function.name}: {error}")
        return weigh_scores(
            scores,
            {function.name: function.weight for function in self._functions},
            call.response,
        )

    async def _score_one(self, function: RewardFunction, call: Call) -> Any:
        columns = {
            name: call.columns[name] for name in function.columns if name in call.columns
        }
        if names := self._verl_names.get(function):
            return await self._result(
                function, verl_arguments(names, call.response, columns)
            )
        return await self._result(function, {"response": call.response} | columns)

    async def _score_batch(self, function: RewardFunction, calls: list[Call]) -> list[Any]:
        """Return one value or _FunctionError per call. If the batch fails, each call is tried alone."""
        columns = {}
        for name in function.columns:
            columns[name] = [call.columns.get(name) for call in calls]
        try:
            values = await self._result(
                function, {"responses": [call.response for call in calls]} | columns
            )
            if not isinstance(values, Sequence) or len(values) != len(calls):
                raise _FunctionError(f"returned {quote(values)} for {len(calls)} responses")
            return list(values)
        except _FunctionError as error:
            if len(calls) == 1:
                return [error]
        return [(await self._score_batch(function, [call]))[0] for call in calls]

    async def _result(self, function: RewardFunction, arguments: dict[str, Any]) -> Any:
        try:
            value = self._functions[function](**arguments)
            if not isawaitable(value):
                return value
            # Not wait_for: it makes a task, whose BaseExceptions of RAISED would end the loop.
            async with asyncio.timeout(self._timeout_s):
                return await value
        except TimeoutError:
            raise _FunctionError(
                f"took more than reward.timeout_s={self._timeout_s:g} s"
            ) from None
        except RAISED as error:
            raise _FunctionError(f"raised {describe_error(error)}") from None


class _FunctionError(Exception):
    """State why a function returned no score."""
