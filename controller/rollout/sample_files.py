"""Write and read samples: untrained ones of a checkpoint, and all of a recorded step.

    checkpoint   StoredSamples <--read_samples, write_samples--> step-30.npz
    step         RolloutBatch <--read_step, write_step--> runs/NAME/samples/step-3.npz, which `controller.replay` trains

Compressed arrays: rows of tokens with offsets, results and scores as JSON. They are read without pickle.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import ray

from controller.observability.run_folder import writing
from controller.rollout.samples import SAMPLED_COLUMNS, RolloutBatch
from workers.dataproto import DataProto, object_column
from workers.errors import DataError
from workers.remote_batch import RemoteBatch
from workers.rollout.prefix_hashes import prefix_hashes
from workers.rollout.requests import Response, SampleResult
from workers.score import Score

PARTIAL = ("ids", "log_probs", "versions")
"""Kept fields of an unfinished Response."""


@dataclass(frozen=True)
class FinishedSample:
    """A result with its row of tokens (`Episode.row`), and its score if known. A dropped sample lacks a row."""

    result: SampleResult
    row: dict[str, np.ndarray]
    score: Score | None


@dataclass(frozen=True)
class StoredSamples:
    """The content of a file. partial: by seed."""

    finished: list[FinishedSample] = field(default_factory=list)
    partial: dict[int, Response] = field(default_factory=dict)


def write_samples(path: Path, samples: StoredSamples) -> None:
    """Write a file and replace `path` when it is complete. Raises OutputError."""
    records = {"finished": [_record(sample) for sample in samples.finished], "partial": list(samples.partial)}
    partial = [{name: getattr(response, name) for name in PARTIAL} for response in samples.partial.values()]
    arrays = {"records": _as_bytes(records)}
    arrays |= _packed("finished", DataProto.from_rows([sample.row for sample in samples.finished if sample.row]))
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
        return StoredSamples(finished, dict(zip(records["partial"], partial, strict=True)))


def write_step(path: Path, rollout: RolloutBatch) -> None:
    """Write a step's samples and the rows that it trains on, replacing `path` when complete.

    Raises OutputError, and DataError for a value of a record that JSON does not have.
    """
    samples, trained = rollout.samples, rollout.trained
    row_of = {key: row for row, key in enumerate(_keys(samples))}
    added = {name: column for name, column in trained.columns.items() if name not in rollout.batch.columns}
    objects = {name: column.tolist() for name, column in added.items() if column.dtype.kind == "O"}
    arrays = {f"added.{name}": column for name, column in added.items() if name not in objects}
    # Hashes of prefixes follow from the tokens.
    arrays |= {f"columns.{name}": column for name, column in samples.columns.items() if name != "prefix_hashes"}
    arrays["trained"] = np.array([row_of[key] for key in _keys(trained)], dtype=np.int64)
    try:
        arrays["scores"] = _as_bytes([asdict(score) for score in rollout.by_sample.values()])
        arrays["objects"] = _as_bytes(objects)
    except TypeError as error:
        raise DataError(
            f"run.record_samples cannot keep a column of algorithm.loss.columns={','.join(objects)}: {error}. Give it "
            "as numbers or text."
        ) from None
    _write(path, arrays | _packed("tokens", _fetched(samples.tokens["input_ids"])))


def read_step(path: Path, put: Callable[[DataProto], Any] | None = None) -> RolloutBatch:
    """Read the samples of a step. put: stores their tokens and returns a reference, None is `ray.put`.

    Raises DataError for a file that is missing or broken.
    """
    with _opened(path) as arrays:
        tokens, columns, trained = _unpacked("tokens", arrays), _named("columns", arrays), arrays["trained"]
        objects = {name: object_column(values) for name, values in _from_bytes(arrays["objects"]).items()}
        scores = [Score(**values) for values in _from_bytes(arrays["scores"])]
        added = _named("added", arrays) | objects
        prompts = columns["prompt_tokens"].tolist()
    hashes = [prefix_hashes(tokens.row(row)["input_ids"], prompts[row]) for row in range(len(tokens))]
    kept = [name for name in SAMPLED_COLUMNS if name in tokens.tokens]
    samples = RemoteBatch.of_block((put or ray.put)(tokens), columns | {"prefix_hashes": object_column(hashes)}, kept)
    rollout = RolloutBatch(samples, dict(zip(_keys(samples), scores, strict=True)), dropped=0, retried=0)
    return replace(rollout, trained=rollout.batch.select(trained).with_columns(**added))


def _keys(samples: RemoteBatch) -> list[tuple[str, int]]:
    return list(zip(samples["uid"].tolist(), samples["sample"].tolist(), strict=True))


def _fetched(places: np.ndarray) -> DataProto:
    refs = list(dict.fromkeys(ref for ref, _, _ in places))
    blocks = dict(zip(refs, ray.get(refs), strict=True))
    return DataProto.from_rows([blocks[ref].row(row) for ref, _, row in places])


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
    del result["prefix_hashes"]  # they follow from the tokens
    return {"result": result, "score": score}


def _finished(record: Mapping[str, Any], rows: Iterable[dict[str, np.ndarray]]) -> FinishedSample:
    values = dict(record["result"])
    environment = values.pop("environment")
    versions = tuple((version, tokens) for version, tokens in values.pop("version_tokens"))
    result = SampleResult(**values, version_tokens=versions, environment=_score(environment))
    row = next(iter(rows)) if result.row >= 0 else {}
    if row:
        result = replace(result, prefix_hashes=prefix_hashes(row["input_ids"], result.prompt_tokens))
    return FinishedSample(result, row, _score(record["score"]))


def _score(values: Mapping[str, Any] | None) -> Score | None:
    return None if values is None else Score(**values)


def _rows(block: DataProto) -> list[dict[str, np.ndarray]]:
    return [block.row(index) for index in range(len(block))]
