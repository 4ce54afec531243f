"""Plays an episode: policy and environment take turns until one of them or a limit ends it.

reset --> [sample a turn --> step --> observation] --> ... --> done | no turn or token left | failed
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from workers.environment import Observation, Text, as_text
from workers.environment_process import EpisodeEnvironment
from workers.errors import EpisodeError
from workers.rollout.conversation import Conversation
from workers.rollout.episode import Episode, Turn
from workers.rollout.requests import LENGTH
from workers.score import Score

SampleTurn = Callable[[Episode], Awaitable[Turn]]


async def play(
    episode: Episode,
    sample: SampleTurn,
    environments: AbstractAsyncContextManager[EpisodeEnvironment],
    conversation: Conversation,
    record: dict[str, Any],
) -> tuple[str, Score]:
    """Play `episode` to its end; returns its finish reason, and its score, with `failure` set if it has none.

    The score's `turns` hold the environment's opening alone.

    The episode has at least one turn: if the environment fails at the start, the policy answers the bare prompt,
    because every sequence needs a token to learn from. Errors of `sample` pass through.
    """
    score = Score(0.0, "")
    try:
        async with environments as environment:
            opening = await environment.reset(record)
            _open(episode, conversation, opening)
            score = Score(0.0, "", turns=({"environment": as_text(opening)},) if opening else ())
            reason = ""
            while not reason:
                turn = await _take_turn(episode, sample)
                observation = await environment.step(conversation.response(turn.ids))
                score = _with(score, observation)
                reason = episode.end(done=observation.done) or _observe(episode, conversation, observation.text)
            return reason, score
    except EpisodeError as failure:
        turn = episode.turns[-1] if episode.turns else await _take_turn(episode, sample)
        return turn.finish_reason, Score(0.0, "", failure=f"environment: {failure}")


def _open(episode: Episode, conversation: Conversation, opening: Text) -> None:
    prompt_ids = conversation.opened(episode.ids, opening)
    if not episode.open(prompt_ids):
        raise EpisodeError(
            f"reset made a prompt of {len(prompt_ids)} tokens, which leaves no room for a turn; raise "
            "rollout.max_episode_tokens"
        )


async def _take_turn(episode: Episode, sample: SampleTurn) -> Turn:
    turn = await sample(episode)
    episode.add(turn)
    return turn


def _observe(episode: Episode, conversation: Conversation, text: Text) -> str:
    """Append an observation; `length` if there is no room for it."""
    ids = conversation.observation_ids(episode.turns[-1].ids, text)
    return "" if episode.observe(ids) else LENGTH


def _with(score: Score, observation: Observation) -> Score:
    parts = score.parts | dict(observation.parts)
    return Score(score.reward + observation.reward, "", parts, failure=score.failure, turns=score.turns)
