"""Episode: one sample, grown turn by turn as token ids, in which policy and environment take turns.

    reset --> [sample a turn --> step --> observation] --> ... --> done | no turn or token left | failed

    prompt | turn | observation | turn | observation | turn          one row of a DataProto
             ^^^^                 ^^^^                 ^^^^          the policy's: loss_mask True, log-probs

The next prompt is `Episode.ids`, the sampled ids: tokenizing their text again could give other tokens. The driver keeps
each `PartialResponse`, so that another engine can continue an unfinished turn (`after`).
"""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.environment import Observation, Text, as_text
from workers.errors import EpisodeError
from workers.rollout.conversation import Conversation
from workers.rollout.requests import LENGTH, STOP, TURNS, PartialResponse
from workers.score import Score
from workers.user_code.environments import RemoteEnvironment

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


@dataclass(frozen=True)
class Turn:
    """Tokens that the engine sampled in one request.

    ids: int32 [n], including an end-of-sequence token. log_probs: float32 [n]. finish_reason: `stop` or `length`.
    versions: int32 [n], of the weights. read_tokens: tokens before the turn; `cached_tokens` of them were in the prefix
    cache. routed_experts: int16 [m, layers, k] of the first m tokens read; None without `model.router_replay`.
    """

    ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: str
    versions: np.ndarray
    read_tokens: int = 0
    cached_tokens: int = 0
    routed_experts: np.ndarray | None = None


@dataclass(frozen=True)
class Limits:
    """turns: of an episode. tokens: after the prompt, turns and observations together."""

    turns: int
    tokens: int


class Episode:
    """The tokens so far, the turns among them, and the room within the limits."""

    def __init__(self, prompt_ids: np.ndarray, limits: Limits) -> None:
        self.limits = limits
        self.turns: list[Turn] = []
        self.prompt_tokens, self.observation_tokens = len(prompt_ids), 0
        self._ids = [prompt_ids]
        self._log_probs = [np.zeros(len(prompt_ids), np.float32)]
        self._versions = [_of_no_weights(len(prompt_ids))]
        self._sampled = [False]

    @property
    def ids(self) -> np.ndarray:
        """All tokens, int32: the prompt of the next turn."""
        return np.concatenate(self._ids)

    @property
    def prompt_hash(self) -> int:
        """Hash of the prompt, int64, the same in every process."""
        digest = hashlib.blake2b(self._ids[0].tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, signed=True)

    @property
    def response_tokens(self) -> int:
        """Tokens that the policy produced."""
        return sum(len(turn.ids) for turn in self.turns)

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self.limits.tokens - self.response_tokens - self.observation_tokens

    @property
    def version_tokens(self) -> tuple[tuple[int, int], ...]:
        """(version of weights, tokens sampled with it), oldest first; at least one after a turn."""
        versions, counts = np.unique(np.concatenate([turn.versions for turn in self.turns]), return_counts=True)
        return tuple(zip(versions.tolist(), counts.tolist(), strict=True))

    def open(self, prompt_ids: np.ndarray) -> bool:
        """Replace the prompt by a longer one; returns False if that leaves no room for a turn.

        Added tokens count against the limit.
        """
        added = len(prompt_ids) - self.prompt_tokens
        if added >= self.room:
            return False
        self.prompt_tokens += added
        self.limits = replace(self.limits, tokens=self.limits.tokens - added)
        self._ids, self._log_probs = [prompt_ids], [np.zeros(len(prompt_ids), np.float32)]
        self._versions = [_of_no_weights(len(prompt_ids))]
        return True

    def add(self, turn: Turn) -> None:
        """Append a turn that the policy sampled after `ids`."""
        self.turns.append(turn)
        self._append(turn.ids, turn.log_probs, turn.versions, sampled=True)

    def observe(self, ids: np.ndarray) -> bool:
        """Append an observation, int32; returns False if that leaves no room for another turn."""
        if len(ids) >= self.room:
            return False
        self.observation_tokens += len(ids)
        self._append(ids, np.zeros(len(ids), np.float32), _of_no_weights(len(ids)), sampled=False)
        return True

    def end(self, *, done: bool) -> str:
        """Finish reason after the last turn: `length` (cut off), `stop` (`done`), `turns` (none left), or "" to
        continue.
        """
        if self.turns[-1].finish_reason == LENGTH:
            return LENGTH
        if done:
            return STOP
        return TURNS if len(self.turns) == self.limits.turns else ""

    def row(self) -> dict[str, np.ndarray]:
        """Token columns: `input_ids` int32, `loss_mask` bool, `rollout_log_probs` float32, `weight_versions` int32.

        `weight_versions` is -1 where the policy sampled nothing. `routed_experts` (optional): int16 [n, layers, k], -1
        for unread tokens at the end.
        """
        row = {
            "input_ids": self.ids,
            "loss_mask": np.repeat(self._sampled, [len(part) for part in self._ids]),
            "rollout_log_probs": np.concatenate(self._log_probs),
            "weight_versions": np.concatenate(self._versions),
        }
        routed = self.turns[-1].routed_experts if self.turns else None
        if routed is not None:
            unread = np.full((len(row["input_ids"]) - len(routed), *routed.shape[1:]), -1, np.int16)
            row["routed_experts"] = np.concatenate([routed, unread])
        return row

    def _append(self, ids: np.ndarray, log_probs: np.ndarray, versions: np.ndarray, *, sampled: bool) -> None:
        self._ids.append(ids)
        self._log_probs.append(log_probs)
        self._versions.append(versions)
        self._sampled.append(sampled)


SampleTurn = Callable[[Episode], Awaitable[Turn]]


async def play(
    episode: Episode,
    sample: SampleTurn,
    environments: AbstractAsyncContextManager[RemoteEnvironment],
    conversation: Conversation,
    record: dict[str, Any],
) -> tuple[str, Score]:
    """Play `episode` to its end; returns its finish reason, and its score, with `failure` set if it has none.

    The score's `turns` hold the environment's opening alone. If the environment fails at the start, the policy answers
    the bare prompt, because every sequence needs a token to learn from. Errors of `sample` pass through.
    """
    score = Score(0.0, "")
    try:
        async with environments as environment:
            opening = await environment.reset(record)
            _open_episode(episode, conversation, opening)
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


def _open_episode(episode: Episode, conversation: Conversation, opening: Text) -> None:
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
    """Append an observation; returns `length` if there is no room."""
    ids = conversation.observation_ids(episode.turns[-1].ids, text)
    return "" if episode.observe(ids) else LENGTH


def _with(score: Score, observation: Observation) -> Score:
    parts = score.parts | dict(observation.parts)
    return Score(score.reward + observation.reward, "", parts, failure=score.failure, turns=score.turns)


def _of_no_weights(tokens: int) -> np.ndarray:
    return np.full(tokens, -1, np.int32)


def partial_responses(engine: "AsyncLLM") -> dict[str, PartialResponse]:
    """Unfinished responses with tokens, by request name.

    vLLM reports versions only with finished outputs; its output processor has them before.
    """
    states = engine.output_processor.request_states.values()
    return {state.external_req_id: _partial(state) for state in states if state.detokenizer.num_output_tokens()}


def _partial(state: Any) -> PartialResponse:
    return PartialResponse(
        np.array(state.detokenizer.output_token_ids, dtype=np.int32),
        np.array(state.logprobs_processor.logprobs.logprobs, dtype=np.float32),
        token_versions(state._weight_version_spans()),
    )


def token_versions(spans: Sequence[Any]) -> np.ndarray:
    """Expand vLLM's spans of weight versions to int32 [tokens]."""
    return np.repeat([int(span.version) for span in spans], [span.end - span.start for span in spans]).astype(np.int32)


def joined(begun: PartialResponse | None, rest: PartialResponse) -> PartialResponse:
    """Join a beginning and the rest."""
    if begun is None:
        return rest
    return PartialResponse(
        np.concatenate([begun.ids, rest.ids]),
        np.concatenate([begun.log_probs, rest.log_probs]),
        np.concatenate([begun.versions, rest.versions]),
    )


def after(begun: PartialResponse, rest: Turn) -> Turn:
    """The whole turn: `begun`, then `rest`."""
    whole = joined(begun, PartialResponse(rest.ids, rest.log_probs, rest.versions))
    read = rest.read_tokens - len(begun.ids)
    return replace(
        rest,
        ids=whole.ids,
        log_probs=whole.log_probs,
        versions=whole.versions,
        read_tokens=read,
        cached_tokens=min(rest.cached_tokens, read),
    )
