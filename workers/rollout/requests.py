"""Requests to an engine and the light results that come back; importable without torch or vLLM.

SampleRequest --engine--> SampleResult (to the driver) + one row of a DataProto (stays in the object store)
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from workers.environment import Text
from workers.score import Score

STOP, LENGTH, TURNS, ERROR = "stop", "length", "turns", "error"

# "Steps" of samples that no step trains on, for their seeds; all samplings of one kind have the same.
VALIDATION_STEP = -1  # so that validations differ by the policy alone
PROOF_STEP = -2  # samples that engines and trainer are compared on
GENERATION_STEP = -3  # of `controller.generate`


@dataclass(frozen=True)
class EpisodeStart:
    """Start of an episode: the record, and its prompt as it was tokenized (text or chat messages)."""

    record: dict[str, Any]
    prompt: Text


@dataclass(frozen=True)
class PartialResponse:
    """The beginning of a response that is still generated, n tokens. ids: int32 [n]. log_probs: float32 [n], of the
    weights `versions`, int32 [n], that sampled each."""

    ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray


@dataclass(frozen=True)
class SampleRequest:
    """A request for one response. prompt_ids: int32 [prompt tokens]; the samples of a group share the array. start: set
    if an environment answers the policy's turns; otherwise there is one turn. begun: its first tokens, where an engine
    sampled them before. priority: engines that are short of memory serve the lowest first."""

    uid: str
    sample: int
    prompt_ids: np.ndarray
    seed: int
    start: EpisodeStart | None = None
    begun: PartialResponse | None = None
    priority: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the sample within a round."""
        return self.uid, self.sample


COUNTS = (
    "prompt_tokens",
    "read_tokens",
    "cached_tokens",
    "prompt_hash",
    "response_tokens",
    "length",
    "turns",
    "weight_version",
    "newest_weight_version",
)
"""Fields of a SampleResult that are counts, columns of a batch."""


@dataclass(frozen=True)
class SampleResult:
    """The result of one request.

    response_tokens: those of the policy. observation_tokens: those that an environment put between its turns.
    prompt_hash: int64, equal for equal prompts. prefix_hashes: see `workers.rollout.prefix_hashes`. read_tokens: those
    before its turns, of which the engine had `cached_tokens` from requests that begin with the same ones.
    finish_reason: `stop` (end of sequence, or the environment was done), `length` (sampling.max_new_tokens,
    rollout.max_episode_tokens or the engine's longest sequence), `turns` (rollout.max_turns) or `error`, with the
    reason in `error`. weight_version, newest_weight_version: the oldest and the newest weights that any of its tokens
    was sampled with. version_tokens: (version, number of tokens sampled with it), oldest first. environment: its
    reward, or why it has none; None without one. row: its row in the DataProto that came with it; -1 after an error.
    replica: the engine it ran on, from `start`, seconds since 1970 by the clock there, for `seconds`, waiting for its
    turn included.
    """

    uid: str
    sample: int
    prompt_tokens: int
    response_tokens: int
    finish_reason: str
    weight_version: int
    error: str = ""
    row: int = -1
    newest_weight_version: int = -1
    turns: int = 1
    observation_tokens: int = 0
    prompt_hash: int = 0
    prefix_hashes: bytes = b""
    read_tokens: int = 0
    cached_tokens: int = 0
    version_tokens: tuple[tuple[int, int], ...] = ()
    environment: Score | None = None
    replica: int = -1
    start: float = 0.0
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the sample within a round."""
        return self.uid, self.sample

    @property
    def length(self) -> int:
        """All tokens of the sequence."""
        return self.prompt_tokens + self.response_tokens + self.observation_tokens

    @property
    def failed(self) -> bool:
        """True if there is no response."""
        return self.finish_reason == ERROR


@dataclass(frozen=True)
class WeightLoad:
    """One update of weights in one engine, including the time that requests are paused. start: seconds since 1970 by
    its clock."""

    version: int
    start: float
    seconds: float


def sample_seed(run_seed: int, step: int, uid: str, sample: int) -> int:
    """A seed in [0, 2^63) that is the same on every machine and in every process, unlike `hash`."""
    return _seed(f"{run_seed}/{step}/{sample}/{uid}")


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a sample's turn, counted from 0, derived from the sample's: the first turn has that itself."""
    return _seed(f"{seed}/{turn}") if turn else seed


def _seed(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
