"""verifiers: `traces.jsonl`, an episode or a trace a line (Episode.to_record, Trace.to_record).

A trace is a graph of messages. Each path from a root to a leaf is a row, as in prime-rl's training.
"""

from pathlib import Path
from typing import Any

from ballast.audit.bundle import Bundle
from ballast.audit.readers.json_lines import Record, read_records
from ballast.audit.readers.rows import Rows

KEYS = {"task"}
"""Episodes have `traces` with it, traces have `nodes`."""
TRUNCATIONS = (
    "max_turns",
    "max_input_tokens",
    "max_output_tokens",
    "max_total_tokens",
    "compaction_failed",
)
MISSING = {
    "new_logprobs": "traces do not have it",
    "old_logprobs": "traces have it if the trainer annotated them",
}
SAMPLED_COLUMNS = {
    "sampler_logprobs": "logprobs",
    "old_logprobs": "trainer_logprobs",
    "reference_logprobs": "reference_logprobs",
    "advantages": "advantages",
}
"""Column: field of a node, with a number for each sampled token of it."""


def read(paths: list[Path]) -> Bundle:
    """Read the traces of a step."""
    rows = Rows(paths[0])
    step = 0
    for path in paths:
        for place, values in read_records(path):
            record = Record(place, values)
            if record.has("nodes"):
                _add_trace(rows, record, None, None)
                continue
            work = record.record("run").record("work")
            step = work.whole("step") if work.has("step") else step
            group = record.record("group").values.get("id")
            for trace in record.records("traces"):
                _add_trace(rows, trace, group, _weight_version(work))
    return rows.bundle("verifiers traces", MISSING, step=step)


def _weight_version(work: Record) -> int | None:
    """Return the version of the weights, or None if they changed while the episode ran."""
    policy = work.record("policy")
    if policy.has("start") and policy.values["start"] == policy.values.get("end"):
        return policy.whole("start")
    return None


def _add_trace(rows: Rows, trace: Record, group: str | None, version: int | None) -> None:
    task = trace.record("task")
    key = group or task.values.get("key") or task.values.get("hash")
    sample = trace.values.get("id") or trace.place
    nodes = trace.records("nodes")
    parents = {node.values.get("parent") for node in nodes}
    for leaf in range(len(nodes)):
        if leaf in parents:
            continue
        row = _read_path(_path_to(trace, nodes, leaf))
        if not any(row["loss_mask"]):
            continue
        length = len(row["token_ids"])
        rows.add(
            **row,
            rewards=_reward(trace),
            group=None if key is None else rows.number("group", str(key)),
            sample=rows.number("sample", str(sample)),
            truncated=int(_is_truncated(trace)),
            weight_versions=None if version is None else [version] * length,
            prompt_length=row["loss_mask"].index(1),
        )


def _reward(trace: Record) -> float | None:
    """Return the weighted sum of the rewards that were scored."""
    names = [name for name, reward in trace.record("rewards").values.items() if reward]
    if not names:
        return None
    rewards = [trace.record("rewards").record(name) for name in names]
    weights = [
        reward.number("weight") if reward.has("weight") else 1.0 for reward in rewards
    ]
    return sum(
        reward.number("score") * weight
        for reward, weight in zip(rewards, weights, strict=True)
    )


def _is_truncated(trace: Record) -> bool:
    if trace.values.get("stop_condition") in TRUNCATIONS:
        return True
    calls = [call for call in trace.records("calls") if not call.has("error")]
    return bool(calls) and calls[-1].values.get("finish_reason") == "length"


def _path_to(trace: Record, nodes: list[Record], leaf: int) -> list[Record]:
    """Return the nodes from the root to a leaf. A parent comes before its children, so that no path is a
    circle.
    """
    path = []
    number: Any = leaf
    limit = len(nodes)
    while number is not None:
        if not isinstance(number, int) or not 0 <= number < limit:
            raise trace.error("nodes", "a graph in which a parent does not come first")
        path.append(nodes[number])
        limit = number
        number = nodes[number].values.get("parent")
    return path[::-1]


def _read_path(path: list[Record]) -> dict[str, list[Any]]:
    row: dict[str, list[Any]] = {"token_ids": [], "loss_mask": []}
    for node in path:
        token_ids = node.whole_numbers("token_ids")
        row["token_ids"] += token_ids
        row["loss_mask"] += node.whole_numbers("mask", len(token_ids))
    for column, field in SAMPLED_COLUMNS.items():
        if any(node.items(field) for node in path):
            row[column] = [value for node in path for value in _spread(node, field)]
    return row


def _spread(node: Record, field: str) -> list[float]:
    """Return a number for each token of a node, 0 for those that were not sampled."""
    mask = node.whole_numbers("mask")
    if not node.items(field):
        return [0.0] * len(mask)
    values = iter(node.numbers(field, sum(mask)))
    return [next(values) if is_sampled else 0.0 for is_sampled in mask]
