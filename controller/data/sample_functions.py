"""Users' functions of samples: they take columns [B] by name, in processes of their own.

    the batch, record, reward parts --columns_of--> columns
        --by the names of its parameters--> SampleFunction --> value

algorithm.advantage_function    a number a sample         reward.shaping    a number a sample
algorithm.group_filter          of one group: a truth     run.metrics       numbers by name
batch.replay.by                 a number a sample
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from controller.config.functions import OF_SAMPLES
from controller.data.records import Record
from workers.batch.dataproto import object_column, record_column
from workers.batch.remote_batch import RemoteBatch
from workers.batch.score import Score
from workers.errors import DataError, quote
from workers.user_code.functions import IsolatedFunction

Columns = Mapping[str, np.ndarray]
OF_BATCH = (
    "reward",
    "sample",
    "prompt_tokens",
    "response_tokens",
    "truncated",
    "turns",
    "seconds",
    "weight_version",
)
OFFERED = ("group", "response", *OF_BATCH)
"""Columns of all samples. Others are of the record, or parts of the reward."""


def _number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and isfinite(value)


def _each(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(map(_number, value))


def _by_name(value: Any, count: int) -> bool:
    return isinstance(value, dict) and all(map(_number, value.values()))


Form = tuple[str, Callable[[Any, int], bool]]
EACH = ("a finite number for each sample", _each)
TRUTH = ("True or False", lambda value, count: isinstance(value, bool))
FORMS = dict[str, Form](
    zip(
        OF_SAMPLES,
        (EACH, TRUTH, EACH, ("finite numbers by name", _by_name), EACH),
        strict=True,
    )
)
"""What the function of each setting returns, in words, and how it is known."""


@dataclass(frozen=True)
class SampleFunction:
    """names: of the columns that it takes. form: of its value."""

    function: IsolatedFunction
    names: tuple[str, ...]
    form: Form

    def __call__(self, columns: Columns) -> Any:
        """Return its value for `columns` [B]. Raises ConfigError if it fails, DataError for another value."""
        value, (words, fits) = self.function(**columns), self.form
        if not fits(value, len(next(iter(columns.values())))):
            raise DataError(
                f"{self.function.key}: it returned {quote(value)}. Return {words}."
            )
        return np.array(value, dtype=np.float64) if isinstance(value, list) else value


Functions = Mapping[str, SampleFunction]
"""By setting. Those that are not set are left out."""
NO_FUNCTIONS: Functions = {}


def columns_of(
    batch: RemoteBatch,
    names: Iterable[str],
    scores: Mapping[tuple[str, int], Score],
    record: Callable[[str], Record],
) -> dict[str, np.ndarray]:
    """Return `reward` and the columns `names` of a batch [B]. scores: by (uid, sample). record: by uid.

    A sample without a part of the reward has NaN.
    """
    uids = batch["uid"].tolist()
    columns = {"reward": batch["reward"]}
    scored = [scores[key] for key in zip(uids, batch["sample"].tolist(), strict=True)]
    for name in names:
        if name == "group":
            columns[name] = np.unique(batch["uid"], return_inverse=True)[1]
        elif name in OF_BATCH:
            columns[name] = batch[name]
        elif name == "response":
            columns[name] = object_column([score.response for score in scored])
        elif uids and name in record(uids[0]):
            columns[name] = record_column([record(uid)[name] for uid in uids])
        else:
            columns[name] = np.array([score.parts.get(name, np.nan) for score in scored])
    return columns
