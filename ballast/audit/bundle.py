"""A step of any trainer as a folder, which docs/audit.md describes.

step-12/  step.json            algorithm, loss, gradient norm, model, names of what is missing
          tokens.safetensors   flat token columns, row columns, offsets

T tokens in B rows. Row i has the tokens offsets[i] to offsets[i + 1]: prompt and response, joined.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workers.errors import DataError

FORMAT = "ballast-step"
VERSION = 1
FACTS_FILE = "step.json"
TOKENS_FILE = "tokens.safetensors"
OFFSETS = "offsets"

TOKEN_COLUMNS = {
    "token_ids": np.int64,
    "loss_mask": np.int64,
    "sampler_logprobs": np.float32,
    "old_logprobs": np.float32,
    "new_logprobs": np.float32,
    "reference_logprobs": np.float32,
    "advantages": np.float32,
    "weight_versions": np.int64,
}
"""Name: type that is written. A log-prob stands at its own token, and is 0 where nothing was predicted."""
ROW_COLUMNS = {
    "rewards": np.float64,
    "group": np.int64,
    "sample": np.int64,
    "prompt_length": np.int64,
    "truncated": np.int64,
    "trained": np.int64,
    "mini_batch": np.int64,
    "micro_batch": np.int64,
    "greedy_rewards": np.float64,
}
"""Name: type that is written. `trained` is 0 for rows that the update left out."""
METRICS = ("loss", "clip_fraction", "approximate_kl")
"""Metrics of a step that are computed again from its columns."""
REQUIRED_COLUMNS = ("token_ids", "loss_mask")
NUMPY_TYPES = {
    "BOOL": "?",
    "I8": "i1",
    "U8": "u1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "F32": "<f4",
    "F64": "<f8",
}

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
MOST_TOKENS = 2**31
TOKENS_AT_A_TIME = 2**18


class MissingError(Exception):
    """A check needs a column or a fact that the bundle lacks."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True)
class Algorithm:
    """Settings of the step's algorithm. None: not known, and its checks say so.

    estimator: of advantages, a name in `estimators.ESTIMATORS`. epsilon: added to the standard deviation.
    loss: `ppo_clip`, `reinforce`, `cispo` or `gspo`. clip_low, clip_high: a ratio stays between
    1 - clip_low and 1 + clip_high. dual_clip: 0 for none. aggregation: a name in `aggregations.AGGREGATIONS`.
    constant_length: divisor of `sequence_mean_token_sum_norm`. kl_estimator: of the KL in the loss, `k1`,
    `k2`, `k3` or `absolute`. kl_in_reward: weight of a KL that was subtracted from rewards.
    correction: truncated weights old over sampler, `none`, `token` or `sequence`, of at most
    correction_cap. temperature, top_p, top_k: of sampling. group_size: samples of a prompt.
    """

    estimator: str | None = None
    epsilon: float | None = None
    loss: str | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    aggregation: str | None = None
    constant_length: int | None = None
    kl_coefficient: float | None = None
    kl_estimator: str | None = None
    kl_in_reward: float | None = None
    entropy_coefficient: float | None = None
    correction: str | None = None
    correction_cap: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    group_size: int | None = None


@dataclass(frozen=True)
class Named:
    """A model or a chat template. hash: of its files or its text."""

    name: str = ""
    hash: str = ""


@dataclass(frozen=True)
class Facts:
    """What step.json holds.

    loss, gradient_norm: as the trainer reported them, a number, or one for each mini-batch.
    token_denominators, sequence_denominators: what the trainer divided by, for each mini-batch.
    weight_version: of the trainer when the step began. learning_rate: of its updates.
    sampled: samples that were generated for the step. dropped: samples that were left out, by reason.
    end_tokens: ids that end a response. missing: why, by the name of a column or a fact.
    precision: `float32` or `bfloat16`, of the trainer's and the sampler's forward pass.
    writer: the system and its version. metrics: those in METRICS, of the step or of each mini-batch.
    """

    step: int = 0
    algorithm: Algorithm = field(default_factory=Algorithm)
    loss: tuple[float, ...] = ()
    gradient_norm: tuple[float, ...] = ()
    token_denominators: tuple[float, ...] = ()
    sequence_denominators: tuple[float, ...] = ()
    model: Named = field(default_factory=Named)
    template: Named = field(default_factory=Named)
    weight_version: int | None = None
    learning_rate: float | None = None
    sampled: int | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    end_tokens: tuple[int, ...] = ()
    precision: str = ""
    writer: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Bundle:
    """A step. tokens: columns [T] by name. rows: columns [B] by name. offsets: int64 [B + 1]."""

    facts: Facts
    offsets: np.ndarray
    tokens: Mapping[str, np.ndarray]
    rows: Mapping[str, np.ndarray]
    path: str = ""

    @property
    def row_count(self) -> int:
        return len(self.offsets) - 1

    @property
    def token_count(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def missing(self) -> dict[str, str]:
        """Return the columns of the format that are not there, with the writer's reason."""
        names = [name for name in (*TOKEN_COLUMNS, *ROW_COLUMNS) if not self.has(name)]
        reasons = dict.fromkeys(names, "not given")
        return reasons | dict(self.facts.missing)

    @property
    def unread_columns(self) -> list[str]:
        """Return columns that the format does not know, and that no check reads."""
        unknown_tokens = set(self.tokens) - set(TOKEN_COLUMNS)
        unknown_rows = set(self.rows) - set(ROW_COLUMNS)
        return sorted(unknown_tokens | unknown_rows)

    def has(self, *names: str) -> bool:
        return all(name in self.tokens or name in self.rows for name in names)

    def token_column(self, name: str) -> np.ndarray:
        """Return a column [T]. Raises MissingError."""
        if name not in self.tokens:
            raise MissingError(name)
        return self.tokens[name]

    def row_column(self, name: str) -> np.ndarray:
        """Return a column [B]. Raises MissingError."""
        if name not in self.rows:
            raise MissingError(name)
        return self.rows[name]

    def setting(self, name: str) -> Any:
        """Return a setting of the algorithm. Raises MissingError if it is not known."""
        value = getattr(self.facts.algorithm, name)
        if value is None:
            raise MissingError(f"algorithm.{name}")
        return value

    def fact(self, name: str) -> Any:
        """Return what the trainer reported. Raises MissingError if it is not known."""
        value = getattr(self.facts, name)
        if value is None or value in ((), ""):
            raise MissingError(name)
        return value

    def row_of_token(self, token: int) -> int:
        return int(np.searchsorted(self.offsets, token, side="right")) - 1

    def select(self, start: int, end: int) -> "Bundle":
        """Return the rows from `start` to `end`, without a copy."""
        first_token = self.offsets[start]
        last_token = self.offsets[end]
        tokens = {
            name: column[first_token:last_token] for name, column in self.tokens.items()
        }
        rows = {name: column[start:end] for name, column in self.rows.items()}
        offsets = self.offsets[start : end + 1] - first_token
        return Bundle(self.facts, offsets, tokens, rows, self.path)

    def parts(self, tokens: int = TOKENS_AT_A_TIME) -> Iterator[tuple[int, "Bundle"]]:
        """Yield whole rows of about `tokens` tokens, and the number of the first, to keep memory flat."""
        start = 0
        while start < self.row_count:
            limit = self.offsets[start] + tokens
            end = int(np.searchsorted(self.offsets, limit, side="right")) - 1
            end = max(end, start + 1)
            yield start, self.select(start, end)
            start = end


def check_offsets(place: str, offsets: np.ndarray) -> None:
    if not len(offsets) or offsets[0] != 0 or np.any(np.diff(offsets) < 0):
        raise DataError(
            f"{place}: {OFFSETS} must begin with 0 and never fall. Write rows + 1 numbers."
        )
    if offsets[-1] > MOST_TOKENS:
        raise DataError(
            f"{place}: {OFFSETS} end at {offsets[-1]}, above {MOST_TOKENS}. Split the step."
        )


def check_columns(place: str, bundle: Bundle) -> None:
    """Raise DataError unless the columns have the sizes and types of the format."""
    check_offsets(place, np.asarray(bundle.offsets))
    for name in REQUIRED_COLUMNS:
        if name not in bundle.tokens:
            raise DataError(
                f"{place}: it has no {name}. Every bundle needs {' and '.join(REQUIRED_COLUMNS)}."
            )
    types = TOKEN_COLUMNS | ROW_COLUMNS
    sizes = (
        (bundle.tokens, bundle.token_count, "tokens"),
        (bundle.rows, bundle.row_count, "rows"),
    )
    for columns, count, unit in sizes:
        for name, column in columns.items():
            if column.shape != (count,):
                shape = "x".join(map(str, column.shape))
                raise DataError(
                    f"{place}: {name} has {shape} values for {count} {unit}. Write one for each."
                )
            if (
                np.issubdtype(types.get(name, np.float64), np.integer)
                and column.dtype.kind not in "iub"
            ):
                raise DataError(
                    f"{place}: {name} has the type {column.dtype}. Write whole numbers."
                )
            if column.dtype.kind not in "iubf":
                raise DataError(
                    f"{place}: {name} has the type {column.dtype}. Write numbers."
                )
    for name in bundle.facts.missing:
        if bundle.has(name):
            raise DataError(
                f"{place}: {name} is there, but {FACTS_FILE} calls it missing. Leave one out."
            )
