"""Read a step of a Ballast run that was recorded with run.record_samples.

samples/step-3.npz    samples, rewards                                         \\
samples/update-3.npz  advantages, old and reference log-probs, mini-batches    --read_recorded_step--> Bundle
samples/log-probs-3.npz  new log-probs, metrics of mini-batches                /
config.yaml, metrics.jsonl    settings, metrics of the step                    /
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ballast.audit.bundle import METRICS, Algorithm, Bundle, Facts, Named, check_columns
from controller.config import Config
from controller.config.recorded import load_recorded
from controller.observability import run_folder
from workers.config.loss import automatic_aggregation
from workers.errors import DataError, clause

CONFIG = "config.yaml"
LARGEST_MODEL_FILE = 2**20
UPDATE_COLUMNS = {
    "old_logprobs": "tokens.old_log_probs",
    "reference_logprobs": "tokens.reference_log_probs",
    "advantages": "tokens.advantages",
}
"""Column of a bundle: its name in the file of an update."""
MISSING = {"template": "a run does not record its hash"}
NO_LOG_PROBS = "this run's version did not keep them"


def is_ballast_run(path: Path) -> bool:
    return (path / CONFIG).is_file()


def recorded_steps(path: Path) -> list[int]:
    return run_folder.recorded_steps(path)


def read_recorded_step(path: Path, step: int) -> Bundle:
    """Return what a run knows of a step. Raises DataError if a file is broken."""
    config = load_recorded(path / CONFIG)
    if not isinstance(config, Config):
        raise DataError(
            f"{path}: this run trained on given sequences. Only runs of controller.fit have steps."
        )
    file = run_folder.step_file(path, step)
    try:
        with np.load(file, allow_pickle=False) as arrays:
            offsets, tokens, rows = _read_columns(arrays, config)
            in_update = _rows_of_update(arrays["trained"], rows["trained"])
        facts = _facts(path, step, config)
        update = run_folder.update_file(path, step)
        replayed = 0
        if update.is_file():
            with np.load(update, allow_pickle=False) as arrays:
                replayed = _add_update(arrays, in_update, offsets, tokens, rows)
        log_probs = run_folder.log_probs_file(path, step)
        if log_probs.is_file():
            with np.load(log_probs, allow_pickle=False) as arrays:
                _add_log_probs(arrays, _token_places(offsets, in_update), tokens)
                facts = _with_mini_batches(facts, arrays, config)
        else:
            facts = _without(facts, "new_logprobs", NO_LOG_PROBS)
    except (
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        BadZipFile,
        zlib.error,
    ) as error:
        raise DataError(
            f"{file}: cannot be read: {clause(error)}. Record the samples again."
        ) from None
    reason = _why_loss_is_unknown(
        config, replayed, has_branches="prompt_length" not in rows
    )
    if reason:
        facts = replace(_without(facts, "loss", reason), loss=(), metrics={})
    if replayed:
        facts = replace(facts, token_denominators=())
    bundle = Bundle(facts, offsets, tokens, rows, f"{path}, step {step}")
    check_columns(str(file), bundle)
    return bundle


def _read_columns(
    arrays: Mapping[str, np.ndarray], config: Config
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return offsets, token columns and row columns of the rows to train on."""
    uids = arrays["columns.uid"]
    counts = (
        arrays["columns.branches"]
        if "columns.branches" in arrays
        else np.zeros(len(uids), np.int64)
    )
    stored, sample = _training_rows(counts)
    offsets = arrays["tokens.offsets"]
    lengths = np.diff(offsets)[stored]
    places = _token_places(offsets, stored)
    tokens = {
        "token_ids": arrays["tokens.input_ids"][places],
        "loss_mask": arrays["tokens.loss_mask"][places],
        "sampler_logprobs": arrays["tokens.rollout_log_probs"][places],
    }
    if "tokens.weight_versions" in arrays:
        tokens["weight_versions"] = arrays["tokens.weight_versions"][places]
    scores = json.loads(arrays["scores"].tobytes())
    truncated = arrays["columns.truncated"][sample]
    trained = np.zeros(len(stored), np.int64)
    trained[arrays["trained"]] = 1
    if config.reward.truncated == "mask":
        trained[truncated] = 0
    rows = {
        "rewards": np.array([score["reward"] for score in scores], np.float64)[sample],
        "group": np.unique(uids, return_inverse=True)[1][sample],
        "sample": arrays["columns.sample"][sample],
        "truncated": truncated,
        "trained": trained,
    }
    if not counts.any():  # a branch has a prompt of its own
        rows["prompt_length"] = arrays["columns.prompt_tokens"]
    return np.concatenate([[0], np.cumsum(lengths)]), tokens, rows


def _token_places(offsets: np.ndarray, rows: np.ndarray) -> np.ndarray:
    places = [np.arange(offsets[row], offsets[row + 1]) for row in rows]
    return np.concatenate(places) if places else np.empty(0, np.int64)


def _rows_of_update(chosen: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Return the rows of the update, in its order. chosen: rows of the step, also those that it masks."""
    return chosen[trained[chosen] > 0]


def _add_update(
    arrays: Mapping[str, np.ndarray],
    in_update: np.ndarray,
    offsets: np.ndarray,
    tokens: dict[str, np.ndarray],
    rows: dict[str, np.ndarray],
) -> int:
    """Add the columns of an update, and count the replayed rows behind `in_update`."""
    count = len(in_update)
    lengths = arrays["length"]
    places = _token_places(offsets, in_update)
    if not np.array_equal(lengths[:count], np.diff(offsets)[in_update]):
        raise ValueError("its rows are not those of the step's samples")
    rows["mini_batch"] = np.zeros(len(offsets) - 1, np.int64)
    rows["mini_batch"][in_update] = arrays["mini_batch"][:count]
    for column, name in UPDATE_COLUMNS.items():
        if name in arrays:
            tokens[column] = np.zeros(offsets[-1], np.float32)
            tokens[column][places] = arrays[name][: len(places)]
    if "advantages" in arrays:
        tokens["advantages"] = np.zeros(offsets[-1], np.float32)
        tokens["advantages"][places] = np.repeat(
            arrays["advantages"][:count], lengths[:count]
        )
    return len(lengths) - count


def _add_log_probs(
    arrays: Mapping[str, np.ndarray], places: np.ndarray, tokens: dict[str, np.ndarray]
) -> None:
    """Add the log-probs of an update. They are also the old ones of an update that read no others."""
    new = np.zeros(len(tokens["token_ids"]), np.float32)
    new[places] = arrays["tokens.new_log_probs"][: len(places)]
    tokens["new_logprobs"] = new
    tokens.setdefault("old_logprobs", new)


def _with_mini_batches(
    facts: Facts, arrays: Mapping[str, np.ndarray], config: Config
) -> Facts:
    """Add numbers of the mini-batches. With several epochs, these of the first replace the step's."""
    metrics = dict(facts.metrics)
    if config.batch.epochs > 1:
        metrics = {name: _listed(arrays, name) for name in METRICS}
    return replace(
        facts,
        loss=_listed(arrays, "loss"),
        gradient_norm=_listed(arrays, "grad_norm"),
        token_denominators=tuple(arrays["loss_tokens"].astype(np.float64).tolist()),
        metrics={name: values for name, values in metrics.items() if values},
    )


def _listed(arrays: Mapping[str, np.ndarray], name: str) -> tuple[float, ...]:
    return tuple(arrays[f"metrics.{name}"].tolist()) if f"metrics.{name}" in arrays else ()


def _without(facts: Facts, name: str, reason: str) -> Facts:
    return replace(facts, missing=dict(facts.missing) | {name: reason})


def _why_loss_is_unknown(config: Config, replayed: int, *, has_branches: bool) -> str:
    loss = config.algorithm.loss
    if replayed:
        return f"it is also of {replayed} rows that were replayed from earlier steps"
    if loss.distillation.coefficient:
        return "it has a part of the teacher (algorithm.loss.distillation)"
    if loss.kl_coefficient and loss.kl_correction == "importance":
        return "its KL is weighted by ratios (algorithm.loss.kl_correction=importance)"
    aggregation = loss.aggregation
    if aggregation == "auto":
        aggregation = automatic_aggregation(loss.name)
    if has_branches and aggregation != "token_mean":
        return "samples of several rows count once"
    return ""


def _training_rows(branches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the stored row and the sample of each row to train on.

    A sample is stored as one row, and after it come its branches, which are trained in its place.
    """
    stored: list[int] = []
    samples: list[int] = []
    first = 0
    for sample, count in enumerate(branches.tolist()):
        rows = range(first + 1, first + 1 + count) if count else [first]
        stored += rows
        samples += [sample] * len(rows)
        first += 1 + count
    return np.array(stored, np.int64), np.array(samples, np.int64)


def _facts(path: Path, step: int, config: Config) -> Facts:
    metrics = {row["step"]: row for row in run_folder.RunFolder(path).metrics}
    of_step = metrics.get(step, {})
    version = 0 if step == 1 else metrics.get(step - 1, {}).get("rollout/weight_version")
    dropped = int(of_step.get("rollout/samples_dropped") or 0)
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if config.resources.device == "cpu" else ""
    step_metrics = {}
    if config.batch.epochs == 1:
        step_metrics = {name: _numbers(of_step, f"policy/{name}") for name in METRICS}
    return Facts(
        step=step,
        algorithm=_algorithm(config),
        loss=_numbers(of_step, "policy/loss"),
        gradient_norm=_numbers(of_step, "policy/grad_norm"),
        model=Named(config.model.path),
        weight_version=None if version is None else int(version),
        learning_rate=of_step.get("policy/learning_rate"),
        dropped={"failed": dropped} if dropped else {},
        end_tokens=_end_tokens(Path(config.model.path)),
        precision=dtype,
        writer="ballast",
        metrics={name: values for name, values in step_metrics.items() if values},
        missing=MISSING,
    )


def _numbers(metrics: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """Null in metrics.jsonl stands for a number that is not finite."""
    if name not in metrics:
        return ()
    value = metrics[name]
    return (float("nan") if value is None else float(value),)


def _algorithm(config: Config) -> Algorithm:
    algorithm = config.algorithm
    loss = algorithm.loss
    estimator = algorithm.advantage
    if estimator == "grpo" and not algorithm.normalize_by_std:
        estimator = "dr_grpo"
    if algorithm.advantage_function:
        estimator = "custom"
    aggregation = loss.aggregation
    if aggregation == "auto":
        aggregation = automatic_aggregation(loss.name)
    correction = loss.rollout_correction
    return Algorithm(
        estimator=estimator,
        epsilon=1e-6,
        loss=loss.name,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        aggregation=aggregation or None,
        constant_length=loss.constant_length,
        kl_coefficient=loss.kl_coefficient,
        kl_estimator=loss.kl_estimator,
        kl_in_reward=algorithm.kl_in_reward.coefficient,
        entropy_coefficient=loss.entropy_coefficient,
        correction=correction.weights if correction.rejection == "none" else None,
        correction_cap=correction.cap,
        temperature=config.rollout.sampling.temperature,
        top_p=config.rollout.sampling.top_p,
        top_k=config.rollout.sampling.top_k,
        group_size=config.rollout.samples_per_prompt,
    )


def _end_tokens(model: Path) -> tuple[int, ...]:
    """Return the ids that end a response, as the model's files name them, if they are here."""
    for name in ("generation_config.json", "config.json"):
        file = model / name
        try:
            if not file.is_file() or file.stat().st_size > LARGEST_MODEL_FILE:
                continue
            ends = json.loads(file.read_bytes()).get("eos_token_id")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        ends = ends if isinstance(ends, list) else [ends]
        numbers = tuple(token for token in ends if isinstance(token, int))
        if numbers:
            return numbers
    return ()
