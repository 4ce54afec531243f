"""A user's functions, such as the reward, and environment: found and tried before anything starts, never imported here.

reward.function --find_function--> packed, signature --requested_columns--> RewardFunction, tried once by check_rewards
rollout.environment --find_class--> packed, tried once by check_environment
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.environment import Observation, Text
from workers.environment_process import EnvironmentPool
from workers.errors import ConfigError, EpisodeError
from workers.reward_process import RAW, Call, RewardFunction, RewardProcess
from workers.score import Score
from workers.user_code import Signature

RESPONSES = {"response", "responses"}


def requested_columns(signature: Signature, record: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Which of the record's columns, and `response_raw`, the function takes by name, beside `response` or `responses`.

    Raises ConfigError if it has neither parameter or requires a column that the data does not have.
    """
    names = set(signature.names)
    if "completions" in signature.required:
        raise ConfigError(
            f"reward.function={name!r} takes 'completions', as rewards of TRL do; here it takes 'responses', the texts "
            "of all samples, or 'response', that of one, and returns a number for each (see docs/migration.md)."
        )
    if len(names & RESPONSES) != 1 and not signature.takes_all:
        raise ConfigError(
            f"reward.function={name!r} must take a parameter 'response', or 'responses' for many at once."
        )
    offered = set(record)
    lacking = sorted(set(signature.required) - offered - RESPONSES - {RAW})
    if lacking:
        raise ConfigError(f"reward.function={name!r} asks for {lacking}, but the data has {sorted(offered)}.")
    return tuple(sorted((offered if signature.takes_all else names & offered) - RESPONSES | names & {RAW}))


@dataclass(frozen=True)
class Answered:
    """An environment's opening of an episode, and its answer to an empty response."""

    opening: Text
    observation: Observation


def check_environment(environment: bytes, example: dict[str, Any], *, timeout_s: float) -> Answered:
    """Play one turn, an empty response to one record, in a process of its own; returns what the environment said.

    Raises ConfigError with what went wrong: an environment must answer any text.
    """

    async def one_turn() -> Answered:
        pool = EnvironmentPool(environment, timeout_s, silent=True)
        try:
            async with pool.episode() as played:
                return Answered(await played.reset(example), await played.step(""))
        finally:
            await pool.stop()

    try:
        return asyncio.run(one_turn())
    except EpisodeError as error:
        raise ConfigError(
            f"rollout.environment failed on the first record and an empty response: {_sentence(error)}"
        ) from None


def check_rewards(functions: Sequence[RewardFunction], example: Mapping[str, Any], *, timeout_s: float) -> Score:
    """Score an empty response to one record in a process of its own, and return the score.

    Raises ConfigError with what went wrong: a function must score any text.
    """
    process = RewardProcess(functions, timeout_s=timeout_s, concurrency=1, silent=True)
    try:
        score = process.run([Call(0, "", {**example, RAW: ""})])[0]
    finally:
        process.stop()
    if score.failure:
        raise ConfigError(
            f"reward.function failed on the first record and an empty response: {_sentence(score.failure)}"
        )
    return score


def _sentence(text: object) -> str:
    return f"{str(text).rstrip('.')}."
