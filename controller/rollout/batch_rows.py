"""Rows of a batch: the sequences that samples become, which of them are trained, and columns for losses."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.batch.dataproto import object_column, record_column
from workers.batch.remote_batch import RemoteBatch
from workers.engine.requests import Branch

if TYPE_CHECKING:
    from controller.config.sections import RewardConfig
    from controller.data.prompts import Prompt
    from workers.config.roles import TeacherConfig

BRANCH_COLUMNS = tuple(column.name for column in fields(Branch))
KEPT_ADVANTAGES = "kept_advantages"
"""Column: advantages of replayed rows, NaN for new rows."""


def trainable_rows(batch: RemoteBatch, reward: "RewardConfig") -> RemoteBatch:
    """Return the sequences that the loss sees: with reward.truncated=mask, those that no limit cut off."""
    return batch.select(~batch["truncated"]) if reward.truncated == "mask" else batch


def training_rows(samples: RemoteBatch) -> RemoteBatch:
    """Replace each sample with branches by these, in order, with their lengths, prompts and tokens."""
    branches = [sample_branches or (None,) for sample_branches in samples["branches"]]
    rows = samples.select(
        np.repeat(
            np.arange(len(samples)), [len(sample_branches) for sample_branches in branches]
        )
    )
    branch_rows = [
        (row, number, branch)
        for row, (number, branch) in enumerate(_number_branches(branches))
        if branch
    ]
    columns = {
        name: column.copy() for name, column in rows.columns.items() if name != "branches"
    }
    tokens = {name: column.copy() for name, column in rows.tokens.items()}
    for row, number, branch in branch_rows:
        for name in columns.keys() & set(BRANCH_COLUMNS):
            columns[name][row] = getattr(branch, name)
        for column in tokens.values():
            block, name, first = column[row]
            column[row] = (block, name, first + 1 + number)
    return RemoteBatch(columns, tokens, samples.meta)


def _number_branches(branches: Iterable[Sequence[Any]]) -> Iterator[tuple[int, Any]]:
    return itertools.chain.from_iterable(map(enumerate, branches))


def sample_numbers(rows: RemoteBatch) -> np.ndarray:
    """Number samples from 0, int64 [B], one for all rows of a sample, which stand together."""
    follows = [
        np.append(False, rows[name][1:] == rows[name][:-1]) for name in ("uid", "sample")
    ]
    return np.cumsum(~(follows[0] & follows[1])) - 1 if len(rows) else np.empty(0, np.int64)


def with_record_columns(
    batch: RemoteBatch, prompts: Mapping[str, "Prompt"], names: Sequence[str]
) -> RemoteBatch:
    """Add columns of the sequences' records: float64 [B] if all are numbers, else objects [B]. prompts: by
    uid.
    """
    records = [prompts[uid].columns for uid in batch["uid"].tolist()]
    columns = {}
    for name in names:
        columns[name] = record_column([record[name] for record in records])
    return batch.with_columns(**columns)


def assign_teachers(
    settings: "TeacherConfig", batch: RemoteBatch, prompts: Mapping[str, "Prompt"]
) -> tuple[np.ndarray, RemoteBatch]:
    """Return the name of each sequence's teacher, "" for the only one, and the batch with the prompts that
    teachers read. prompts: by uid.
    """
    batch_prompts = [prompts[uid] for uid in batch["uid"].tolist()]
    names = np.array(
        [
            str(prompt.columns[settings.key]) if settings.paths else ""
            for prompt in batch_prompts
        ]
    )
    if not settings.context_key:
        return names, batch
    ids = [prompt.teacher_ids for prompt in batch_prompts]
    added = np.array([len(prompt_ids) for prompt_ids in ids]) - batch["prompt_tokens"]
    numbers: dict[bytes, int] = {}
    return names, batch.with_columns(
        length=batch["length"] + added,
        prompt_tokens=batch["prompt_tokens"] + added,
        prompt_hash=np.array(
            [numbers.setdefault(prompt_ids.tobytes(), len(numbers)) for prompt_ids in ids]
        ),
        teacher_prompt=object_column(ids),
    )


def newly_sampled(batch: RemoteBatch) -> RemoteBatch:
    """Return the rows that were not replayed."""
    return (
        batch.select(np.isnan(batch[KEPT_ADVANTAGES]))
        if KEPT_ADVANTAGES in batch.columns
        else batch
    )
