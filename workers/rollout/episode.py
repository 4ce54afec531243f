"""Episode: one sample, grown turn by turn as token ids, in which policy and environment take turns.

    reset --> [sample a turn --> step --> observation] --> ... --> done | no turn or token left | failed

    prompt | turn | observation | turn | observation | turn          one row of a DataProto
             ^^^^                 ^^^^                 ^^^^          the policy's: loss_mask True, log-probs

The next prompt is `Episode.ids`, the sampled ids: tokenizing their text again could give other tokens.
"""

import hashlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np

from workers.environment import Observation, as_text
from workers.errors import EpisodeError
from workers.rollout.conversation import Conversation
from workers.rollout.requests import LENGTH, STOP, TURNS, Response
from workers.score import Score
from workers.user_code.environments import RemoteEnvironment


class Episode:
    """The tokens so far, the turns among them, and the room within the limits."""

    def __init__(self, prompt_ids: np.ndarray, *, max_turns: int, max_tokens: int) -> None:
        """max_tokens: after the prompt, turns and observations together."""
        self.turns: list[Response] = []
        self._max_turns, self._max_length = max_turns, len(prompt_ids) + max_tokens
        self._parts = [_not_sampled(prompt_ids)]

    @property
    def ids(self) -> np.ndarray:
        """All tokens, int32: the prompt of the next turn."""
        return np.concatenate([part.ids for part in self._parts])

    @property
    def prompt_tokens(self) -> int:
        return len(self._parts[0].ids)

    @property
    def prompt_hash(self) -> int:
        """int64, the same in every process."""
        digest = hashlib.blake2b(self._parts[0].ids.tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, signed=True)

    @property
    def response_tokens(self) -> int:
        return sum(len(turn.ids) for turn in self.turns)

    @property
    def observation_tokens(self) -> int:
        return len(self.ids) - self.prompt_tokens - self.response_tokens

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self._max_length - len(self.ids)

    @property
    def version_tokens(self) -> tuple[tuple[int, int], ...]:
        """(version of weights, tokens sampled with it), oldest first, at least one after a turn."""
        versions, counts = np.unique(np.concatenate([turn.versions for turn in self.turns]), return_counts=True)
        return tuple(zip(versions.tolist(), counts.tolist(), strict=True))

    def open(self, prompt_ids: np.ndarray) -> bool:
        """Replace the prompt by a longer one, within the limit. Returns False if no room for a turn is left."""
        if len(prompt_ids) >= self._max_length:
            return False
        self._parts = [_not_sampled(prompt_ids)]
        return True

    def add(self, turn: Response) -> None:
        """Append a turn that the policy sampled after `ids`."""
        self.turns.append(turn)
        self._parts.append(turn)

    def observe(self, ids: np.ndarray) -> bool:
        """Append an observation, int32. Returns False if that leaves no room for another turn."""
        if len(ids) >= self.room:
            return False
        self._parts.append(_not_sampled(ids))
        return True

    def end(self, *, done: bool) -> str:
        """Return how the last turn ended: `length` (cut off), `stop` (`done`), `turns` (none left), or ""."""
        if self.turns[-1].finish_reason == LENGTH:
            return LENGTH
        if done:
            return STOP
        return TURNS if len(self.turns) == self._max_turns else ""

    def row(self) -> dict[str, np.ndarray]:
        """Return `input_ids` int32, `loss_mask` bool, `rollout_log_probs` float32, `weight_versions` int32.

        `weight_versions` is -1 where the policy sampled nothing. `routed_experts` (optional): int16 [n, layers, k], -1
        for unread tokens at the end.
        """
        versions = np.concatenate([part.versions for part in self._parts])
        row = {
            "input_ids": self.ids,
            "loss_mask": versions >= 0,
            "rollout_log_probs": np.concatenate([part.log_probs for part in self._parts]),
            "weight_versions": versions,
        }
        routed = self.turns[-1].routed_experts if self.turns else None
        if routed is not None:
            unread = np.full((len(versions) - len(routed), *routed.shape[1:]), -1, np.int16)
            row["routed_experts"] = np.concatenate([routed, unread])
        return row


def _not_sampled(ids: np.ndarray) -> Response:
    return Response(ids, np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32))


async def play(
    episode: Episode,
    sample: Callable[[Episode], Awaitable[Response]],
    environments: AbstractAsyncContextManager[RemoteEnvironment],
    conversation: Conversation,
    record: dict[str, Any],
) -> tuple[str, Score]:
    """Play `episode` to its end. Returns its finish reason, and its score, with `failure` set if it has none.

    The score's `turns` hold the environment's opening alone. If the environment fails at the start, the policy answers
    the bare prompt, because every sequence needs a token to learn from.
    """
    try:
        async with environments as environment:
            opening = await environment.reset(record)
            prompt_ids = conversation.opened(episode.ids, opening)
            if not episode.open(prompt_ids):
                raise EpisodeError(
                    f"reset made a prompt of {len(prompt_ids)} tokens, which leaves no room for a turn. Raise "
                    "rollout.max_episode_tokens"
                )
            score = Score(0.0, "", turns=({"environment": as_text(opening)},) if opening else ())
            while True:
                turn = await sample(episode)
                episode.add(turn)
                observation = await environment.step(conversation.turn(turn.ids, finished=turn.finish_reason == STOP))
                score = _with(score, observation)
                if reason := episode.end(done=observation.done):
                    return reason, score
                if not episode.observe(conversation.observation_ids(turn.ids, observation.text)):
                    return LENGTH, score
    except EpisodeError as failure:
        if not episode.turns:
            episode.add(await sample(episode))
        return episode.turns[-1].finish_reason, Score(0.0, "", failure=f"environment: {failure}")


def _with(score: Score, observation: Observation) -> Score:
    parts = score.parts | dict(observation.parts)
    return Score(score.reward + observation.reward, "", parts, failure=score.failure, turns=score.turns)
