"""Play episodes of a user's environment without a model. The environment runs in processes of its own.

record, policy --EnvironmentPool--> reset, step, step ... --> PlayedEpisode
"""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from ballast.certify.environment.policies import Policy, Position
from workers.environment import Observation, Turn, as_text
from workers.errors import EpisodeError
from workers.user_code.environments import EnvironmentPool, RemoteEnvironment

Record = dict[str, Any]


@dataclass
class PlayedEpisode:
    """record: its number in the data, from 1. failure: why reset or a step gave no answer.

    done: whether the environment ended it. seconds: of reset, then of every step.
    """

    record: int
    policy: str
    opening: str = ""
    responses: list[str] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    failure: str = ""
    done: bool = False
    seconds: list[float] = field(default_factory=list)

    @property
    def reward(self) -> float:
        return sum(observation.reward for observation in self.observations)

    @property
    def trace(self) -> list[Any]:
        """All that a policy could see of it: two episodes are alike if these are equal."""
        steps = [(as_text(seen.text), seen.reward, seen.done) for seen in self.observations]
        return [self.opening, *steps, self.failure]

    @property
    def texts(self) -> list[str]:
        """Texts that the policy reads. The last observation of an episode that is over is not read."""
        observations = self.observations[:-1] if self.done else self.observations
        return [self.opening, *(as_text(seen.text) for seen in observations)]


@dataclass(frozen=True)
class Rules:
    """How an environment is played. prompt_key: column of the prompt."""

    prompt_key: str
    max_turns: int


def spread(records: Sequence[Record], count: int) -> list[tuple[int, Record]]:
    """Return records from all over the data, with their numbers from 1."""
    step = max(1, len(records) // count)
    return [(position + 1, records[position]) for position in range(0, len(records), step)][
        :count
    ]


class EpisodePlayer:
    """Play one episode, a call a turn, so that several can be interleaved."""

    def __init__(self, rules: Rules, number: int, record: Record, policy: Policy) -> None:
        self._rules = rules
        self._record = record
        self._policy = policy
        self.played = PlayedEpisode(number, policy.name)

    @property
    def is_over(self) -> bool:
        played = self.played
        return bool(
            played.done
            or played.failure
            or len(played.observations) >= self._rules.max_turns
        )

    async def reset(self, environment: RemoteEnvironment) -> None:
        start = time.monotonic()
        try:
            self.played.opening = as_text(await environment.reset(self._record))
        except EpisodeError as error:
            self.played.failure = str(error)
        self.played.seconds.append(time.monotonic() - start)

    async def step(self, environment: RemoteEnvironment) -> None:
        played = self.played
        turn = self._answer()
        start = time.monotonic()
        try:
            observation = await environment.step(turn)
        except EpisodeError as error:
            played.failure = str(error)
        else:
            played.observations.append(observation)
            played.done = observation.done
        played.responses.append(turn.text)
        played.seconds.append(time.monotonic() - start)

    def _answer(self) -> Turn:
        played = self.played
        if played.observations:
            text = as_text(played.observations[-1].text)
        else:
            text = as_text(self._record[self._rules.prompt_key]) + played.opening
        return self._policy.answer(Position(text, len(played.observations)))


async def play_one(
    pool: EnvironmentPool, rules: Rules, number: int, record: Record, policy: Policy
) -> PlayedEpisode:
    """Play an episode to its end. As in a run, a process whose episode failed is not used again."""
    played = PlayedEpisode(number, policy.name)
    try:
        async with pool.episode() as environment:
            played = await play(environment, rules, number, record, policy)
            if played.failure:
                raise EpisodeError(played.failure)
    except EpisodeError as error:
        played.failure = str(error)
    return played


async def play(
    environment: RemoteEnvironment,
    rules: Rules,
    number: int,
    record: Record,
    policy: Policy,
) -> PlayedEpisode:
    player = EpisodePlayer(rules, number, record, policy)
    await player.reset(environment)
    while not player.is_over:
        await player.step(environment)
    return player.played


async def play_interleaved(
    pool: EnvironmentPool, rules: Rules, episodes: Sequence[tuple[int, Record, Policy]]
) -> list[PlayedEpisode]:
    """Play episodes at once, a turn of each in turn, so that the order can be repeated."""
    players = [EpisodePlayer(rules, *episode) for episode in episodes]
    async with AsyncExitStack() as stack:
        environments = [await stack.enter_async_context(pool.episode()) for _ in episodes]
        seats = list(zip(players, environments, strict=True))
        for player, environment in seats:
            await player.reset(environment)
        while not all(player.is_over for player in players):
            for player, environment in seats:
                if not player.is_over:
                    await player.step(environment)
    return [player.played for player in players]
