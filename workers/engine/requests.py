"""Requests to an engine, and the light results that come back. Importable without torch or vLLM.

SampleRequest --engine--> SampleResult (to the driver) + rows of a DataProto (stay in the object store)
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.batch.placed_images import PlacedImage
from workers.batch.score import Score

if TYPE_CHECKING:
    from workers.environment import Text

# versions of tokens between turns, and within a turn by a thinking budget
NOT_SAMPLED = -1
INSERTED = -2
STOP, LENGTH, TURNS, ERROR = "stop", "length", "turns", "error"

# "Steps" for the seeds of samples that no step trains on, one for each kind of sampling.
VALIDATION_STEP = -1  # validations then differ only by the policy
NUMERICS_CHECK_STEP = -2  # of the comparison between engines and trainer
GENERATION_STEP = -3  # of `ballast.sampling_commands.generate`
JUDGE_STEP = -4  # of a judge's answers


@dataclass(frozen=True)
class EpisodeStart:
    """The record of an episode, and its prompt before tokenizing (text or chat messages).

    options: with which the prompt was rendered, see `workers.rendering.Options`. image_key: column that an
    environment or agent gets the prompt's images in, or empty. prompt_key: the prompt's column. image_pixels:
    of images that it sends, see `workers.images.images.resize_image`.
    """

    record: dict[str, Any]
    prompt: "Text"
    options: dict[str, Any] = field(default_factory=dict)
    image_key: str = ""
    prompt_key: str = ""
    image_pixels: tuple[int, int] = (0, 2**20)


@dataclass(frozen=True)
class Response:
    """Tokens that an engine sampled: a response, a turn of an episode, or the beginning of either.

    ids: int32 [n], including an end-of-sequence token. log_probs: float32 [n]. versions: int32 [n], of the
    weights, or INSERTED.
    finish_reason: `stop` or `length`, empty while unfinished. read_tokens: tokens before it, of which
    `cached_tokens` were in the prefix cache. routed_experts: int16 [m, layers, k] of the first m tokens read,
    with model.router_replay.
    stop_string: whether a text of sampling.stop ended it, so that its last token is not an end token. images:
    of tokens that were not sampled, placed in `ids`.
    """

    ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish_reason: str = ""
    read_tokens: int = 0
    cached_tokens: int = 0
    routed_experts: np.ndarray | None = None
    stop_string: bool = False
    images: tuple[PlacedImage, ...] = ()

    @property
    def sampled_tokens(self) -> int:
        return int(np.sum(self.versions >= 0))

    def after(self, beginning: "Response | None") -> "Response":
        """Join with the beginning that another engine sampled, which this engine read as a part of the
        prompt.
        """
        if beginning is None:
            return self
        read = max(0, self.read_tokens - len(beginning.ids))
        return replace(
            self,
            ids=np.concatenate([beginning.ids, self.ids]),
            log_probs=np.concatenate([beginning.log_probs, self.log_probs]),
            versions=np.concatenate([beginning.versions, self.versions]),
            read_tokens=read,
            cached_tokens=min(self.cached_tokens, read),
        )


def not_sampled(
    ids: np.ndarray, version: int = NOT_SAMPLED, images: tuple[PlacedImage, ...] = ()
) -> Response:
    return Response(
        ids,
        np.zeros(len(ids), np.float32),
        np.full(len(ids), version, np.int32),
        images=images,
    )


def join_responses(parts: Sequence[Response]) -> Response:
    """Join tokens between turns."""
    return not_sampled(
        np.concatenate([part.ids for part in parts]), images=images_of(parts)
    )


def images_of(parts: Sequence[Response]) -> tuple[PlacedImage, ...]:
    """Return the images of a row, placed in it. parts: what it holds, in order."""
    starts = itertools.accumulate((len(part.ids) for part in parts), initial=0)
    return tuple(
        replace(image, first=start + image.first)
        for part, start in zip(parts, starts, strict=False)
        for image in part.images
    )


@dataclass(frozen=True)
class SampleRequest:
    """A request for one sample. prompt_ids: int32 [prompt tokens], shared by a group. start: of an episode,
    None for a single response. begun: Response of a lost engine, or SessionRecord. priority: engines short of
    memory serve the lowest first. failures: failed attempts before this one. timeout_s: of an attempt, None
    for no limit. images: of the prompt, expanded in `prompt_ids`. adapter: version in which a LoRA policy was
    published, 0 for the base model. attempt: a number of its own for each time that an engine gets a request.
    """

    uid: str
    sample: int
    prompt_ids: np.ndarray
    seed: int
    start: EpisodeStart | None = None
    begun: Any = None
    priority: int = 0
    failures: int = 0
    timeout_s: float | None = None
    images: tuple[PlacedImage, ...] = ()
    adapter: int = 0
    attempt: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.uid, self.sample

    @property
    def session(self) -> str:
        """Name of an agent's session: the same if it continues, another if it failed."""
        return f"{self.seed:016x}" + (f".{self.failures}" if self.failures else "")


@dataclass(frozen=True)
class Branch:
    """A row to train on of a sample with several. prompt_tokens: its first tokens that equal the sample's
    prompt.

    images: of the row.
    """

    length: int
    response_tokens: int
    prompt_tokens: int
    prompt_hash: int
    prefix_hashes: bytes
    images: tuple[PlacedImage, ...] = ()


COUNTS = (
    "prompt_tokens",
    "read_tokens",
    "cached_tokens",
    "prompt_hash",
    "response_tokens",
    "length",
    "turns",
    "cut_tokens",
    "history_refused",
    "cut_thoughts",
    "weight_version",
    "newest_weight_version",
)
"""Fields of a SampleResult that are counts, columns of a batch."""


@dataclass(frozen=True)
class SampleResult:
    """Hold the result of one request.

    response_tokens: sampled ones. observation_tokens: the environment's, and inserted ones. cut_thoughts:
    turns whose reasoning a budget closed. read_tokens: tokens before each turn, summed. `cached_tokens` of
    them were in the prefix cache. finish_reason: `stop` (end of sequence, or the environment was done),
    `length` (sampling.max_new_tokens, rollout.max_episode_tokens or the engine's longest sequence), `turns`
    (rollout.max_turns) or `error`, explained in `error`. weight_version, newest_weight_version: oldest and
    newest weights that sampled a token. version_tokens: (version, tokens), oldest first. environment: its
    reward or failure.
    messages: of an episode in a chat. row: all tokens in order, in the DataProto that came along, -1 after an
    error.
    branches: rows to train on instead, which follow it, empty if the template changed nothing. cut_tokens,
    history_refused: see `Conversation`. images: of `row`, those of observations with PNG bytes. start:
    seconds since 1970 by the engine's clock. seconds: duration including waiting.
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
    cut_thoughts: int = 0
    observation_tokens: int = 0
    prompt_hash: int = 0
    prefix_hashes: bytes = b""
    read_tokens: int = 0
    cached_tokens: int = 0
    version_tokens: tuple[tuple[int, int], ...] = ()
    environment: Score | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    branches: tuple[Branch, ...] = ()
    images: tuple[PlacedImage, ...] = ()
    cut_tokens: int = 0
    history_refused: bool = False
    replica: int = -1
    start: float = 0.0
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        return self.uid, self.sample

    @property
    def rows(self) -> range:
        """Rows of the DataProto that came along: all tokens in order, and the branches."""
        return (
            range(self.row, self.row + 1 + len(self.branches))
            if self.row >= 0
            else range(0)
        )

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.response_tokens + self.observation_tokens

    @property
    def failed(self) -> bool:
        return self.finish_reason == ERROR


@dataclass(frozen=True)
class WeightLoad:
    """One weight update of an engine, including its pause. start: seconds since 1970 by its clock.

    recompute_seconds: from there until all requests sample again, if their keys and values are computed
    again.
    """

    version: int
    start: float
    seconds: float
    recompute_seconds: float = 0.0


def sample_seed(run_seed: int, step: int, uid: str, sample: int) -> int:
    """Return a seed in [0, 2^63), the same in every process, unlike `hash`."""
    return _seed(f"{run_seed}/{step}/{sample}/{uid}")


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a sample's turn, counted from 0. The first turn uses the sample's seed."""
    return _seed(f"{seed}/{turn}") if turn else seed


def _seed(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
