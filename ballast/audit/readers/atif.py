"""ATIF: trajectories of Harbor's agents (terminal-bench), one JSON file for each.

Token ids stand in `metrics` of an agent's steps, if they were collected. A step whose prompt continues the
sequence before it is part of the same row, others begin a row.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballast.audit.bundle import Bundle
from ballast.audit.readers.json_lines import Record, read_record
from ballast.audit.readers.rows import Rows
from workers.errors import DataError

LACKING = (
    "rewards",
    "group",
    "old_logprobs",
    "new_logprobs",
    "reference_logprobs",
    "advantages",
    "truncated",
)
MISSING = dict.fromkeys(LACKING, "ATIF describes what an agent did, and no training")
FORMAT = "ATIF-"


def is_trajectory(record: Mapping[str, Any]) -> bool:
    return str(record.get("schema_version")).startswith(FORMAT)


def read(paths: list[Path]) -> Bundle:
    """Read trajectories. Each is a sample."""
    rows = Rows(paths[0])
    for number, path in enumerate(paths):
        trajectory = Record(str(path), read_record(path))
        if not is_trajectory(trajectory.values):
            raise DataError(
                f"{path}: schema_version does not begin with {FORMAT}. Name an ATIF trajectory."
            )
        sequences = _read_sequences(trajectory)
        if not sequences:
            raise DataError(
                f"{path}: no step has completion_token_ids. Collect token ids with the trajectories."
            )
        for sequence in sequences:
            mask = sequence["loss_mask"]
            rows.add(
                **sequence,
                **_outcome(trajectory, rows),
                sample=number,
                prompt_length=mask.index(1) if 1 in mask else len(mask),
            )
    return rows.bundle("ATIF trajectories", MISSING, step=0)


def _outcome(trajectory: Record, rows: Rows) -> dict[str, Any]:
    """Return what ATIF has no field for, where `ballast show --atif` wrote it."""
    final = trajectory.record("final_metrics").record("extra")
    extra = trajectory.record("extra")
    outcome: dict[str, Any] = {}
    if final.has("reward"):
        outcome["rewards"] = final.number("reward")
    if isinstance(extra.values.get("prompt"), str):
        outcome["group"] = rows.number("group", extra.text("prompt"))
    if isinstance(extra.values.get("truncated"), bool):
        outcome["truncated"] = int(extra.values["truncated"])
    return outcome


def _read_sequences(trajectory: Record) -> list[dict[str, list[Any]]]:
    sequences: list[dict[str, list[Any]]] = []
    for step in trajectory.records("steps"):
        metrics = step.record("metrics")
        if step.values.get("source") != "agent" or not metrics.has("completion_token_ids"):
            continue
        prompt = metrics.whole_numbers("prompt_token_ids")
        completion = metrics.whole_numbers("completion_token_ids")
        if not sequences or not _continues(prompt, sequences[-1]):
            sequences.append({"token_ids": [], "loss_mask": [], "sampler_logprobs": []})
        sequence = sequences[-1]
        added = len(prompt) - len(sequence["token_ids"])
        sequence["token_ids"] = prompt + completion
        sequence["loss_mask"] += [0] * added + [1] * len(completion)
        if not metrics.has("logprobs"):
            sequence.pop("sampler_logprobs", None)
        elif "sampler_logprobs" in sequence:
            sequence["sampler_logprobs"] += [0.0] * added + metrics.numbers(
                "logprobs", len(completion)
            )
    return sequences


def _continues(prompt: list[int], sequence: dict[str, list[Any]]) -> bool:
    token_ids = sequence["token_ids"]
    return prompt[: len(token_ids)] == token_ids
