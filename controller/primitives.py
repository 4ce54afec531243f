"""The calls that every training loop is made of, the configured ones' too. See `ballast.loop.open_run` for
one's own.

plan --forward_backward, once or several times--> gradients --optimizer_step--> weights --publish--> engines
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from balancing import Plan
from controller.planning.planner import with_loss_counts
from controller.rollout.samples import RolloutBatch
from controller.update_passes import ForwardBackward
from workers.batch.dataproto import DataProto, object_column
from workers.batch.metrics import Metric, Metrics, merge
from workers.batch.remote_batch import RemoteBatch, places
from workers.engine.prefix_hashes import prefix_hashes
from workers.errors import DataError

if TYPE_CHECKING:
    from controller.actors.worker_group import WorkerGroup
    from controller.run import Run


def learn(
    group: "WorkerGroup",
    batch: RemoteBatch,
    plan: Plan,
    loss: Any,
    forward_backward: ForwardBackward | None = None,
) -> Metrics:
    """Take one optimiser step on each mini-batch of the plan. loss: settings, see
    `TrainedWorker.loss_function`.

    The metric `loss` is the mean over mini-batches.
    """
    forward_backward = forward_backward or ForwardBackward()
    last = len(plan.mini_batches) - 1
    passes = []
    steps = []
    # Ranks run these in order, without waiting for the driver.
    for number, mini_batch in enumerate(plan.mini_batches):
        passes.append(forward_backward.start(group, batch, plan, mini_batch, loss))
        steps.append(group.optimizer_step.remote(last=number == last))
    metrics_of_passes = []
    metrics_of_steps = []
    for number, mini_batch in enumerate(plan.mini_batches):
        result = passes[number].result()
        step_metrics: Metrics = steps[number].result()
        metrics = forward_backward.metrics(mini_batch, result, step_metrics)
        mean_loss = Metric.sum(metrics["loss"].value / len(plan.mini_batches))
        metrics_of_passes.append(metrics | {"loss": mean_loss})
        metrics_of_steps.append(step_metrics)
    return merge([*metrics_of_passes, *metrics_of_steps])


@dataclass(frozen=True)
class SampledSequence:
    """A sample. prompt_ids, ids: int32. log_probs: float32, of `ids`. finish_reason: `stop` or `length`."""

    prompt_ids: np.ndarray
    ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: str
    reward: float
    response: str


@dataclass(frozen=True)
class Samples:
    """Samples of prompts, prompt by prompt. batch: their rows, as `forward_backward` takes them, with
    `reward` [B].
    """

    rollout: RolloutBatch
    batch: RemoteBatch

    @cached_property
    def sequences(self) -> list[SampledSequence]:
        """Fetch the tokens of each sample."""
        columns = self.rollout.samples
        scores = list(self.rollout.by_sample.values())
        rows = tokens_of(columns.tokens, ("input_ids", "rollout_log_probs"))
        return [
            SampledSequence(
                ids[:start].astype(np.int32),
                ids[start:].astype(np.int32),
                log_probs[start:],
                "length" if cut else "stop",
                score.reward,
                score.response,
            )
            for (ids, log_probs), start, cut, score in zip(
                rows,
                columns["prompt_tokens"].tolist(),
                columns["truncated"].tolist(),
                scores,
                strict=True,
            )
        ]


@dataclass(frozen=True)
class PassResult:
    """Result of a pass. metrics: of the batch. tokens: columns, which `RemoteBatch.with_tokens` takes."""

    metrics: dict[str, float]
    tokens: dict[str, np.ndarray]

    def rows(self, name: str) -> list[np.ndarray]:
        """Fetch a column: float32, as long as each sequence, 0 where `loss_mask` is False."""
        return [values for (values,) in tokens_of(self.tokens, (name,))]

    @property
    def log_probs(self) -> list[np.ndarray]:
        return self.rows("log_probs")


def tokens_of(
    tokens: Mapping[str, np.ndarray], names: Sequence[str]
) -> list[tuple[np.ndarray, ...]]:
    """Fetch token columns, row by row."""
    batch = RemoteBatch({}, {name: tokens[name] for name in names}).gather()
    fetched_rows = []
    for row in range(len(batch)):
        values = batch.row(row)
        fetched_rows.append(tuple(np.asarray(values[name]) for name in names))
    return fetched_rows


def token_batch(
    rows: Sequence[Mapping[str, Any]], uids: Sequence[str], columns: Mapping[str, Any]
) -> RemoteBatch:
    """Make a batch of token sequences. See `OpenRun.batch`."""
    import ray

    array_rows = []
    for row in rows:
        array_rows.append({name: np.asarray(column) for name, column in row.items()})
    tokens = DataProto.from_rows(array_rows)
    names = list(tokens.tokens)
    if missing := {"input_ids", "loss_mask"} - set(names):
        raise DataError(
            f"rows lack {sorted(missing)[0]!r}, which every pass reads. Add it."
        )
    ids = [tokens.row(row)["input_ids"] for row in range(len(rows))]
    masks = [tokens.row(row)["loss_mask"].astype(bool) for row in range(len(rows))]
    starts = [int(mask.argmax()) if mask.any() else len(mask) for mask in masks]
    prompts = object_column(
        [row_ids[:start].tobytes() for row_ids, start in zip(ids, starts, strict=True)]
    )
    light = {
        "uid": np.array(uids),
        "sample": np.zeros(len(rows), np.int64),
        "length": tokens.lengths,
        "prompt_tokens": np.array(starts, np.int64),
        "response_tokens": np.array([int(mask.sum()) for mask in masks], np.int64),
        "prompt_hash": np.unique(prompts, return_inverse=True)[1],
        "prefix_hashes": object_column(
            [
                prefix_hashes(row_ids, start)
                for row_ids, start in zip(ids, starts, strict=True)
            ]
        ),
        "truncated": np.zeros(len(rows), bool),
        "group_number": np.arange(len(rows)),
        "sample_number": np.arange(len(rows)),
    }
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    return RemoteBatch.of_block(ray.put(tokens), light | arrays, names)


def with_columns(batch: RemoteBatch, columns: Mapping[str, Any]) -> RemoteBatch:
    """Add columns to a batch: arrays [B], or lists of arrays as long as the sequences."""
    import ray

    for name, values in columns.items():
        if len(values) and np.ndim(values[0]):
            rows = [{name: np.asarray(row, np.float32)} for row in values]
            block = ray.put(DataProto.from_rows(rows))
            batch = batch.with_tokens(
                **{name: places(name, itertools.repeat(block), range(len(rows)))}
            )
        else:
            batch = batch.with_columns(**{name: np.asarray(values)})
    return batch


def part_of(
    run: "Run", batch: RemoteBatch, rows: np.ndarray, pass_name: str
) -> tuple[RemoteBatch, Plan]:
    """Return rows of a batch and their plan, whose denominators count the whole batch."""
    counted = (
        ~batch["truncated"]
        if run.config.reward.truncated == "mask"
        else np.ones(len(batch), bool)
    )
    batch = with_loss_counts(batch, [np.flatnonzero(counted)])
    part = batch.select(rows[counted[rows]])
    plan = run.planner.forward_plan(part, pass_name)
    learns = counted & (batch["response_tokens"] > 0)
    (mini_batch,) = plan.mini_batches
    full_mini_batch = replace(
        mini_batch,
        loss_tokens=int(batch["response_tokens"][learns].sum()),
        sequences=int(learns.sum()),
        groups=len(np.unique(batch["group_number"][learns])),
    )
    return part, replace(plan, mini_batches=(full_mini_batch,))
