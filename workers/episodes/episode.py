"""Episode: one sample, grown turn by turn as token ids, in which policy and environment take turns.

    reset --> [sample a turn --> step --> observation] --> ... --> done | no turn or token left | failed

    prompt | turn | observation | turn | observation | turn          one row of a DataProto
             ^^^^                 ^^^^                 ^^^^          the policy's: loss_mask True, log-probs

The next prompt is `Episode.ids`, the sampled ids: tokenizing their text again could give other tokens.

Where the chat template rewrites what came before (`rollout.history=template`), the next turn is a branch, a
new row:

    prompt | thought, answer                                         row 1
             ^^^^^^^^^^^^^^^
    prompt | answer | observation | thought, answer                  row 2: earlier tokens are its context
                                    ^^^^^^^^^^^^^^^

Each sampled token is trained once, in the row in which it was sampled.
"""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np

from workers.batch.placed_images import PlacedImage, keys
from workers.batch.score import Score
from workers.engine.branches import hash_of
from workers.engine.requests import (
    INSERTED,
    LENGTH,
    STOP,
    TURNS,
    Response,
    images_of,
    not_sampled,
)
from workers.environment import Observation, Text, as_text
from workers.episodes.conversation import Conversation
from workers.errors import EpisodeError
from workers.user_code.environments import RemoteEnvironment


class SampledTurns:
    """Count what was said. Base of an Episode and of a Session.

    turns: sampled ones. _said: all that was read or sampled, in order, the prompt first. _parts: by row.
    """

    turns: list[Response]
    _said: list[Response]
    _parts: list[list[Response]]

    def rows(self) -> list[dict[str, np.ndarray]]:
        """Return all of it in order, and the rows to train on if the first is not one.

        `input_ids` int32, `loss_mask` bool, `rollout_log_probs` float32, `weight_versions` int32, negative
        where the policy sampled nothing (see `requests`). `routed_experts` (optional): int16 [n, layers, k],
        -1 for unread tokens at the end.
        """
        return [row_of(parts) for parts in self._parts]

    @property
    def row_images(self) -> list[tuple[PlacedImage, ...]]:
        """Images of each of `rows`."""
        return [images_of(parts) for parts in self._parts]

    @property
    def prompt_tokens(self) -> int:
        return len(self._said[0].ids)

    @property
    def prompt_hash(self) -> int:
        return hash_of(keys(self._said[0].ids, self._said[0].images))

    @property
    def response_tokens(self) -> int:
        return sum(turn.sampled_tokens for turn in self.turns)

    @property
    def observation_tokens(self) -> int:
        return (
            sum(len(part.ids) for part in self._said)
            - self.prompt_tokens
            - self.response_tokens
        )

    @property
    def cut_thoughts(self) -> int:
        return sum(bool(np.any(turn.versions == INSERTED)) for turn in self.turns)

    @property
    def version_tokens(self) -> tuple[tuple[int, int], ...]:
        """(version of weights, tokens sampled with it), oldest first, at least one after a turn."""
        versions = np.concatenate([turn.versions for turn in self.turns])
        versions, counts = np.unique(versions[versions >= 0], return_counts=True)
        return tuple(zip(versions.tolist(), counts.tolist(), strict=True))


class Episode(SampledTurns):
    """The tokens so far, the turns among them, and the room within the limits."""

    def __init__(
        self,
        prompt_ids: np.ndarray,
        images: tuple[PlacedImage, ...] = (),
        *,
        max_turns: int,
        max_tokens: int,
    ) -> None:
        """images: of the prompt. max_tokens: of a row after the prompt, turns and observations together."""
        self.turns: list[Response] = []
        self._max_turns = max_turns
        self._max_length = len(prompt_ids) + max_tokens
        # All of the episode, in order.
        self._said = [not_sampled(prompt_ids, images=images)]
        self._rows = [list(self._said)]

    @property
    def ids(self) -> np.ndarray:
        """All tokens of the current row, int32: the prompt of the next turn."""
        return _join(self._rows[-1])

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """Images of the current row."""
        return images_of(self._rows[-1])

    @property
    def prompt(self) -> Response:
        return self._said[0]

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self._max_length - len(self.ids)

    def open(self, prompt: Response) -> bool:
        """Replace the prompt by a longer one, within the limit. Returns False if no room for a
        turn is left.
        """
        if len(prompt.ids) >= self._max_length:
            return False
        self._said = [prompt]
        self._rows = [list(self._said)]
        return True

    def add(self, turn: Response) -> None:
        """Append a turn that the policy sampled after `ids`."""
        for parts in (self.turns, self._said, self._rows[-1]):
            parts.append(turn)

    def observe(self, observation: Response, branch: Response | None = None) -> bool:
        """Append an observation. Returns False if that leaves no room for another turn.

        branch: the next prompt, if it does not continue the current row.
        """
        if (
            len(observation.ids) + len(self.ids) if branch is None else len(branch.ids)
        ) >= self._max_length:
            return False
        self._said.append(observation)
        if branch is None:
            self._rows[-1].append(observation)
        else:
            self._rows.append([branch])
        return True

    def end(self, *, done: bool) -> str:
        """Return how the last turn ended: `length` (cut off), `stop` (`done`), `turns` (none left), or ""."""
        if self.turns[-1].finish_reason == LENGTH:
            return LENGTH
        if done:
            return STOP
        return TURNS if len(self.turns) == self._max_turns else ""

    @property
    def _parts(self) -> list[list[Response]]:  # type: ignore[override]
        return self._rows if len(self._rows) == 1 else [self._said, *self._rows]


def _join(parts: Sequence[Response]) -> np.ndarray:
    return np.concatenate([part.ids for part in parts])


def row_of(parts: Sequence[Response]) -> dict[str, np.ndarray]:
    """Return a row, see `Episode.rows`. parts: what it holds, in order."""
    versions = np.concatenate([part.versions for part in parts])
    row = {
        "input_ids": _join(parts),
        "loss_mask": versions >= 0,
        "rollout_log_probs": np.concatenate([part.log_probs for part in parts]),
        "weight_versions": versions,
    }
    routed = parts[-1].routed_experts
    if routed is not None:
        routed = routed[: len(versions)]
        unread = np.full((len(versions) - len(routed), *routed.shape[1:]), -1, np.int16)
        row["routed_experts"] = np.concatenate([routed, unread])
    return row


async def play(
    episode: Episode,
    sample: Callable[[Episode], Awaitable[Response]],
    environments: AbstractAsyncContextManager[RemoteEnvironment],
    conversation: Conversation,
    record: dict[str, Any],
) -> tuple[str, Score]:
    """Play `episode` to its end. Returns its finish reason, and its score, with `failure` set if it has none.

    The score's `turns` hold the environment's opening alone. If the environment fails at the start, the
    policy answers the bare prompt, because every sequence needs a token to learn from.
    """
    try:
        async with environments as environment:
            opening = await environment.reset(record)
            prompt = conversation.open(episode.prompt, opening)
            if not episode.open(prompt):
                raise EpisodeError(
                    f"reset made a prompt of {len(prompt.ids)} tokens, which leaves no room for a turn. "
                    "Raise rollout.max_episode_tokens"
                )
            score = Score(
                0.0, "", turns=({"environment": as_text(opening)},) if opening else ()
            )
            state = _state(opening, prompt)
            while True:
                turn = await sample(episode)
                episode.add(turn)
                message = conversation.turn(turn.ids, finished=turn.finish_reason == STOP)
                observation = await environment.step(message)
                score = _with(
                    score, observation, (turn.sampled_tokens, observation.reward, state)
                )
                if reason := episode.end(done=observation.done):
                    return reason, score
                observed, branch = conversation.observe(turn, message, observation.text)
                state = _state(observation.text, observed)
                if not episode.observe(observed, branch):
                    return LENGTH, score
    except EpisodeError as failure:
        if not episode.turns:
            episode.add(await sample(episode))
        credit = tuple((turn.sampled_tokens, 0.0, 0) for turn in episode.turns)
        return episode.turns[-1].finish_reason, Score(
            0.0, "", failure=f"environment: {failure}", credit=credit
        )


def _with(score: Score, observation: Observation, credit: tuple[int, float, int]) -> Score:
    parts, credits = score.parts | dict(observation.parts), (*score.credit, credit)
    reward = score.reward + observation.reward
    return Score(
        reward, "", parts, failure=score.failure, turns=score.turns, credit=credits
    )


def _state(observation: Text, prompt: Response) -> int:
    digests = "".join(f"\n{placed.image.digest}" for placed in prompt.images)
    text = (as_text(observation) + digests).encode(errors="replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)
