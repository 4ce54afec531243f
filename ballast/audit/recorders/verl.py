"""Record the updates of verl's actor as bundles (verl 0.9).

    ppo_loss --a micro-batch, its log-probs and loss--> update_actor ends --> runs/audit/step-12/

A module that `actor_rollout_ref.model.external_lib` names is imported by every worker:

    import verl.workers.engine_workers as workers
    from ballast.audit.recorders.verl import record_steps

    record_steps(workers, "runs/audit", algorithm={"estimator": "grpo"})
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ballast.audit

AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
}
KL_ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "abs": "absolute",
}
COLUMNS = {
    "old_logprobs": "old_log_probs",
    "sampler_logprobs": "rollout_log_probs",
    "reference_logprobs": "ref_log_prob",
    "advantages": "advantages",
}


def record_steps(
    workers: Any, folder: str | Path, algorithm: Mapping[str, Any] | None = None
) -> None:
    """Wrap `ppo_loss` and `ActorRolloutRefWorker.update_actor` of a module, verl.workers.engine_workers.

    algorithm: settings that a worker does not know, such as the estimator of advantages.
    """
    recorder = UpdateRecorder(Path(folder), dict(algorithm or {}))
    workers.ppo_loss = recorder.wrap_loss(workers.ppo_loss)
    worker_class = workers.ActorRolloutRefWorker
    worker_class.update_actor = recorder.wrap_update(worker_class.update_actor)


@dataclass(frozen=True)
class MicroBatch:
    """What one call of the loss read and returned. logprobs: of all tokens, flat, one place early."""

    config: Any
    data: Any
    logprobs: torch.Tensor
    has_entropy: bool
    loss: float


class UpdateRecorder:
    """Collects the micro-batches of an update, and writes them when it ends."""

    def __init__(self, folder: Path, algorithm: dict[str, Any]) -> None:
        self.folder = folder
        self.algorithm = algorithm
        self.step = 0
        self.micro_batches: list[MicroBatch] = []

    def wrap_loss(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compute_loss)
        def compute_and_record(
            config: Any, model_output: Any, data: Any, dp_group: Any = None
        ) -> Any:
            loss, metrics = compute_loss(config, model_output, data, dp_group)
            logprobs = model_output["log_probs"]
            flat = logprobs.values() if logprobs.is_nested else logprobs
            has_entropy = model_output.get("entropy", None) is not None
            self.micro_batches.append(
                MicroBatch(
                    config,
                    data,
                    flat.detach().float().cpu(),
                    has_entropy,
                    float(loss.detach()),
                )
            )
            return loss, metrics

        return compute_and_record

    def wrap_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        # `wraps` keeps the attributes by which verl's single controller finds the method.
        @functools.wraps(update)
        def update_and_record(worker: Any, data: Any) -> Any:
            self.step += 1
            self.micro_batches = []
            output = update(worker, data)
            if self.micro_batches:
                write_update(self.folder, self.step, self.micro_batches, self.algorithm)
            return output

        return update_and_record


def write_update(
    folder: Path, step: int, micro_batches: list[MicroBatch], algorithm: Mapping[str, Any]
) -> Path:
    """Write micro-batches as a bundle. The rows of several ranks are several bundles."""
    rows: list[dict[str, Any]] = []
    losses: dict[int, float] = {}
    data_parallel = int(_value(micro_batches[0].data, "dp_size") or 1)
    for number, micro_batch in enumerate(micro_batches):
        rows_per_update = (
            int(_value(micro_batch.data, "global_batch_size") or 0) // data_parallel
        )
        mini_batch = len(rows) // rows_per_update if rows_per_update else 0
        losses[mini_batch] = losses.get(mini_batch, 0.0) + micro_batch.loss
        for row in _rows(micro_batch):
            rows.append(row | {"mini_batch": mini_batch, "micro_batch": number})
    groups: dict[str, int] = {}
    for row in rows:
        if "group" in row:
            row["group"] = groups.setdefault(row["group"], len(groups))
    names = [name for name in rows[0] if all(name in row for row in rows)]
    settings, missing = describe_algorithm(micro_batches[0])
    missing["gradient_norm"] = "verl's loss does not know it"
    for column in (*COLUMNS, "rewards", "group"):
        if column not in names:
            missing[column] = f"the actor's batch lacks {COLUMNS.get(column, column)}"
    if data_parallel > 1:
        rank = torch.distributed.get_rank()
        folder = folder / f"rank-{rank}"
        missing["loss"] = (
            f"a rank has its share of the rows alone (data parallel {data_parallel})"
        )
    return ballast.audit.record(
        folder / f"step-{step}",
        step=step,
        algorithm=settings | dict(algorithm),
        loss=None if data_parallel > 1 else list(losses.values()),
        missing=missing,
        writer="verl",
        **{name: [row[name] for row in rows] for name in names},
    )


def _rows(micro_batch: MicroBatch) -> list[dict[str, Any]]:
    data = micro_batch.data
    prompts = _unpadded(data, "prompts")
    responses = _unpadded(data, "responses")
    columns = {
        name: _by_row(data[column])
        for name, column in COLUMNS.items()
        if _has(data, column)
    }
    scores = (
        _by_row(data["token_level_scores"]) if _has(data, "token_level_scores") else None
    )
    uids = _value(data, "uid")
    masks = _by_row(data["response_mask"])
    rows = []
    end = 0
    for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        length = len(response)
        before = [0.0] * len(prompt)
        end += len(prompt) + length
        # A place early, as the logits.
        new = micro_batch.logprobs[end - length - 1 : end - 1]
        row: dict[str, Any] = {
            "token_ids": [*prompt.tolist(), *response.tolist()],
            "loss_mask": [0] * len(prompt) + masks[number][:length].long().tolist(),
            "new_logprobs": before + new.tolist(),
            "prompt_length": len(prompt),
        }
        for name, values in columns.items():
            row[name] = before + values[number][:length].float().tolist()
        if scores is not None:
            row["rewards"] = float(scores[number].sum())
        if uids is not None:
            row["group"] = str(uids[number])
        rows.append(row)
    return rows


def _by_row(column: torch.Tensor) -> list[torch.Tensor]:
    return [row.detach().cpu() for row in column.unbind()]


def _unpadded(data: Any, name: str) -> list[torch.Tensor]:
    """Return ids without padding. Prompts are padded on the left, responses on the right."""
    rows = _by_row(data[name])
    if data[name].is_nested:
        return rows
    mask = data["attention_mask"].cpu()
    width = data["prompts"].shape[1]
    part = mask[:, :width] if name == "prompts" else mask[:, width:]
    return [row[kept.bool()] for row, kept in zip(rows, part, strict=True)]


def _has(data: Any, name: str) -> bool:
    # `in` on a TensorDict itself raises for names of no tensor.
    return name in set(data.keys())


def _value(data: Any, name: str) -> Any:
    """Return a value besides tensors, or None."""
    if not _has(data, name):
        return None
    value = data[name]
    return value.tolist() if hasattr(value, "tolist") else value


def describe_algorithm(micro_batch: MicroBatch) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the actor's settings as the bundle names them, and reasons for those without a name."""
    config = micro_batch.config
    data = micro_batch.data
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    settings: dict[str, Any] = {
        "loss": "ppo_clip",
        "clip_low": low,
        "clip_high": high,
        "dual_clip": config.get("clip_ratio_c", 3.0),
        "aggregation": AGGREGATIONS.get(config.loss_agg_mode),
        "constant_length": config.loss_scale_factor,
        "kl_coefficient": config.kl_loss_coef if config.use_kl_loss else 0.0,
        "kl_estimator": KL_ESTIMATORS.get(config.kl_loss_type),
        "entropy_coefficient": config.entropy_coeff if micro_batch.has_entropy else 0.0,
        "correction": "none",
        "temperature": _value(data, "temperature"),
    }
    missing = {}
    mode = config.policy_loss.get("loss_mode", "vanilla")
    if mode != "vanilla":
        settings["loss"] = None
        missing["algorithm.loss"] = (
            f"policy_loss.loss_mode={mode} has no name in the format"
        )
    elif _has(data, "rollout_is_weights"):
        settings["loss"] = None
        missing["algorithm.loss"] = "rollout_is_weights multiply the loss"
    if settings["aggregation"] is None:
        missing["algorithm.aggregation"] = (
            f"loss_agg_mode={config.loss_agg_mode} has no name in the format"
        )
    return settings, missing
