"""Write and read samples: untrained and replayed ones of a checkpoint, and all of a recorded step.

    checkpoint   StoredSamples <--read_samples, write_samples--> step-30.npz
    checkpoint   rows of a RemoteBatch <--read_rows, write_rows--> replay/step-30.npz
    step         RolloutBatch <--read_step, write_step--> runs/NAME/samples/step-3.npz, which `controller.replay` trains

Compressed arrays: rows of tokens with offsets, results and scores as JSON. They are read without pickle.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import repeat
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import ray

from controller.observability.run_folder import writing
from controller.rollout.samples import SAMPLED_COLUMNS, RolloutBatch
from workers.dataproto import ROUTED_EXPERTS, DataProto, object_column
from workers.errors import DataError
from workers.remote_batch import RemoteBatch, places
from workers.rollout.episode import branches_of
from workers.rollout.prefix_hashes import prefix_hashes
from workers.rollout.requests import Response, SampleResult
from workers.rollout.session import Node, SessionRecord
from workers.score import Score

PARTIAL = ("ids", "log_probs", "versions")
"""Kept fields of an unfinished Response."""
OF_ANSWERS = ("finish_reason", "read_tokens", "cached_tokens", "stop_string")
"""Further ones of an answer in an unfinished session."""


@dataclass(frozen=True)
class FinishedSample:
    """A result with its rows of tokens (`Episode.rows`), and its score if known. A dropped sample lacks rows."""

    result: SampleResult
    rows: list[dict[str, np.ndarray]]
    score: Score | None


@dataclass(frozen=True)
class StoredSamples:
    """The content of a file. partial: unfinished responses and sessions, by seed."""

    finished: list[FinishedSample] = field(default_factory=list)
    partial: dict[int, Response | SessionRecord] = field(default_factory=dict)


def write_samples(path: Path, samples: StoredSamples) -> None:
    """Write a file and replace `path` when it is complete. Raises OutputError."""
    responses = {seed: found for seed, found in samples.partial.items() if isinstance(found, Response)}
    sessions = {seed: found for seed, found in samples.partial.items() if isinstance(found, SessionRecord)}
    partial = [{name: getattr(response, name) for name in PARTIAL} for response in responses.values()]
    nodes = [node for session in sessions.values() for node in session.nodes]
    turns = [{name: np.concatenate([getattr(part, name) for part in node.parts]) for name in PARTIAL} for node in nodes]
    routed = {f"{ROUTED_EXPERTS}.{row}": node.response.routed_experts for row, node in enumerate(nodes)}
    records = {
        "finished": [_record(sample) for sample in samples.finished],
        "partial": list(responses),
        "sessions": [(seed, session.rewards, [*map(_turn, session.nodes)]) for seed, session in sessions.items()],
    }
    arrays = {"records": _as_bytes(records)} | {name: found for name, found in routed.items() if found is not None}
    arrays |= _packed("turns", DataProto.from_rows(turns))
    arrays |= _packed("finished", DataProto.from_rows([row for sample in samples.finished for row in sample.rows]))
    arrays |= _packed("partial", DataProto.from_rows(partial))
    _write(path, arrays)


def read_samples(path: Path) -> StoredSamples:
    """Read a file. Raises DataError if it is missing or broken."""
    with _opened(path) as arrays:
        records = _from_bytes(arrays["records"])
        rows = iter(_rows(_unpacked("finished", arrays)))
        finished = [_finished(record, rows) for record in records["finished"]]
        partial = [
            Response(row["ids"], row["log_probs"], row["versions"]) for row in _rows(_unpacked("partial", arrays))
        ]
        turns = enumerate(_rows(_unpacked("turns", arrays)) if "turns.offsets" in arrays else ())
        sessions = {
            seed: SessionRecord(tuple(_node(turn, *next(turns), arrays) for turn in nodes), rewards)
            for seed, rewards, nodes in records.get("sessions", ())
        }
        return StoredSamples(finished, dict(zip(records["partial"], partial, strict=True)) | sessions)


def write_step(path: Path, rollout: RolloutBatch) -> None:
    """Write a step's samples and the rows that it trains on, replacing `path` when complete.

    Raises OutputError, and DataError for a value of a record that JSON does not have.
    """
    samples, trained = rollout.samples, rollout.trained
    row_of = {place: row for row, place in enumerate(rollout.rows.tokens["input_ids"])}
    added = {name: column for name, column in trained.columns.items() if name not in rollout.batch.columns}
    arrays = _columns("added", added)
    # Hashes of prefixes and branches follow from the tokens.
    kept = {name: column for name, column in samples.columns.items() if name not in ("prefix_hashes", "branches")}
    arrays |= {f"columns.{name}": column for name, column in kept.items()}
    arrays["columns.branches"] = np.array([len(found) for found in samples["branches"]], dtype=np.int64)
    arrays["trained"] = np.array([row_of[place] for place in trained.tokens["input_ids"]], dtype=np.int64)
    arrays["scores"] = _as_bytes([asdict(score) for score in rollout.by_sample.values()])
    found = zip(samples.tokens["input_ids"], samples["branches"], strict=True)
    tokens = _fetched([(ref, row + n) for (ref, _, row), branches in found for n in range(1 + len(branches))])
    _write(path, arrays | _packed("tokens", tokens))


def read_step(path: Path, put: Callable[[DataProto], Any] | None = None) -> RolloutBatch:
    """Read the samples of a step. put: stores their tokens and returns a reference, None is `ray.put`.

    Raises DataError for a file that is missing or broken.
    """
    with _opened(path) as arrays:
        tokens, columns, trained = _unpacked("tokens", arrays), _named("columns", arrays), arrays["trained"]
        columns = dict.fromkeys(("branches", "cut_tokens", "history_refused"), 0 * columns["prompt_tokens"]) | columns
        objects = {name: object_column(values) for name, values in _from_bytes(arrays["objects"]).items()}
        scores = [Score(**values) for values in _from_bytes(arrays["scores"])]
        added = _named("added", arrays) | objects
        prompts, branches = columns["prompt_tokens"].tolist(), columns["branches"]
    first = np.cumsum(branches + 1) - branches - 1
    rows = [[tokens.row(row) for row in range(start, start + 1 + n)] for start, n in zip(first, branches, strict=True)]
    columns["prefix_hashes"] = object_column(
        [prefix_hashes(each["input_ids"], prompt) for (each, *_), prompt in zip(rows, prompts, strict=True)]
    )
    columns["branches"] = object_column(
        [branches_of(found, prompt) for found, prompt in zip(rows, prompts, strict=True)]
    )
    kept, block = [name for name in SAMPLED_COLUMNS if name in tokens.tokens], (put or ray.put)(tokens)
    samples = RemoteBatch(columns, {name: places(name, repeat(block), first.tolist()) for name in kept})
    rollout = RolloutBatch(samples, dict(zip(_keys(samples), scores, strict=True)), dropped=0, retried=0)
    return replace(rollout, trained=rollout.rows.select(trained).with_columns(**added))


def write_rows(path: Path, rows: RemoteBatch) -> None:
    """Write rows to train on, with their tokens, replacing `path` when complete. Raises as `write_step`."""
    kept = {name: column for name, column in rows.columns.items() if name != "prefix_hashes"}
    tokens = _fetched([(ref, row) for ref, _, row in rows.tokens["input_ids"]])
    _write(path, _columns("columns", kept) | _packed("tokens", tokens))


def read_rows(path: Path) -> RemoteBatch:
    """Read rows to train on. Raises DataError for a file that is missing or broken."""
    with _opened(path) as arrays:
        tokens = _unpacked("tokens", arrays)
        objects = {name: object_column(values) for name, values in _from_bytes(arrays["objects"]).items()}
        columns = _named("columns", arrays) | objects
        prompts = enumerate(columns["prompt_tokens"].tolist())
    hashes = [prefix_hashes(tokens.row(row)["input_ids"], prompt) for row, prompt in prompts]
    kept = [name for name in SAMPLED_COLUMNS if name in tokens.tokens]
    return RemoteBatch.of_block(ray.put(tokens), columns | {"prefix_hashes": object_column(hashes)}, kept)


def _columns(group: str, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of a file: numbers and texts by name, and `objects`. Raises DataError for what JSON lacks."""
    objects = {name: column.tolist() for name, column in columns.items() if column.dtype.kind == "O"}
    try:
        arrays = {"objects": _as_bytes(objects)}
    except TypeError as error:
        raise DataError(
            f"algorithm.loss.columns={','.join(objects)}: a column cannot be kept in a file: {error}. Give it as "
            "numbers or text."
        ) from None
    return arrays | {f"{group}.{name}": column for name, column in columns.items() if name not in objects}


def _keys(samples: RemoteBatch) -> list[tuple[str, int]]:
    return list(zip(samples["uid"].tolist(), samples["sample"].tolist(), strict=True))


def _fetched(rows: Sequence[tuple[Any, int]]) -> DataProto:
    """Fetch rows of tokens, each by the reference and the row of its block."""
    refs = list(dict.fromkeys(ref for ref, _ in rows))
    blocks = dict(zip(refs, ray.get(refs), strict=True))
    return DataProto.from_rows([blocks[ref].row(row) for ref, row in rows])


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.with_suffix(".part.npz")
        np.savez_compressed(begun, **arrays)  # type: ignore[arg-type]
        begun.replace(path)


@contextmanager
def _opened(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """Open a file for the block. Errors of both become a DataError."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays
    except (OSError, ValueError, KeyError, TypeError, BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _as_bytes(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def _from_bytes(array: np.ndarray) -> Any:
    return json.loads(array.tobytes())


def _packed(name: str, block: DataProto) -> dict[str, np.ndarray]:
    return {f"{name}.offsets": block.offsets} | {f"{name}.{column}": values for column, values in block.tokens.items()}


def _unpacked(name: str, arrays: Mapping[str, np.ndarray]) -> DataProto:
    columns = _named(name, arrays)
    return DataProto(np.diff(columns.pop("offsets")), columns)


def _named(name: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key.removeprefix(f"{name}."): arrays[key] for key in arrays if key.startswith(f"{name}.")}


def _record(sample: FinishedSample) -> dict[str, Any]:
    score = None if sample.score is None else asdict(sample.score)
    result = asdict(sample.result)
    del result["prefix_hashes"]  # they follow from the tokens, as do the branches
    result["branches"] = len(sample.result.branches)
    return {"result": result, "score": score}


def _finished(record: Mapping[str, Any], rows: Iterable[dict[str, np.ndarray]]) -> FinishedSample:
    values = dict(record["result"])
    environment, branches = values.pop("environment"), values.pop("branches", 0)
    versions = tuple((version, tokens) for version, tokens in values.pop("version_tokens"))
    result = SampleResult(**values, version_tokens=versions, environment=_score(environment))
    found = [next(iter(rows)) for _ in range(1 + branches)] if result.row >= 0 else []
    if found:
        hashes = prefix_hashes(found[0]["input_ids"], result.prompt_tokens)
        result = replace(result, prefix_hashes=hashes, branches=branches_of(found, result.prompt_tokens))
    return FinishedSample(result, found, _score(record["score"]))


def _turn(node: Node) -> dict[str, Any]:
    """Return a turn of a session without its tokens."""
    facts = {each.name: getattr(node, each.name) for each in fields(Node) if each.name != "response"}
    return facts | {"given": len(node.given), "response": {name: getattr(node.response, name) for name in OF_ANSWERS}}


def _node(
    turn: Mapping[str, Any], number: int, row: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray]
) -> Node:
    answer: dict[str, Any] = {name: row[name][turn["given"] :] for name in PARTIAL} | turn["response"]
    answer[ROUTED_EXPERTS] = arrays.get(f"{ROUTED_EXPERTS}.{number}")
    return Node(**{**turn, "given": row["ids"][: turn["given"]], "response": Response(**answer)})


def _score(values: Mapping[str, Any] | None) -> Score | None:
    return None if values is None else Score(**values)


def _rows(block: DataProto) -> list[dict[str, np.ndarray]]:
    return [block.row(index) for index in range(len(block))]
