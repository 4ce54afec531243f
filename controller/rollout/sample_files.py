"""Write and read samples: untrained and replayed ones of a checkpoint, and all of a recorded step.

    checkpoint   StoredSamples <--read_samples, write_samples--> step-30.npz
    checkpoint   rows of a RemoteBatch <--read_rows, write_rows--> replay/step-30.npz
    step         RolloutBatch <--read_step, write_step--> runs/NAME/samples/step-3.npz (`ballast.replay`)
    update       rows of a RemoteBatch --write_update--> runs/NAME/samples/update-3.npz (`ballast.audit`)
    update       new log-probs, metrics --write_log_probs--> runs/NAME/samples/log-probs-3.npz

Compressed arrays: rows of tokens with offsets, each image once, results and scores as JSON. They are read
without pickle. Writing raises LostError for tokens of a node that is gone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import ray

from controller.rollout.array_files import (
    as_bytes,
    from_bytes,
    open_arrays,
    pack_rows,
    select_arrays,
    unpack_rows,
    write_arrays,
)
from controller.rollout.samples import SAMPLED_COLUMNS, RolloutBatch
from controller.rollout.update_record import UpdateRecord
from workers.batch.dataproto import ROUTED_EXPERTS, DataProto, object_column
from workers.batch.placed_images import Image, Placed, PlacedImage, keys
from workers.batch.remote_batch import (
    IMAGES,
    RemoteBatch,
    fetch_images,
    fetch_objects,
    places,
)
from workers.batch.score import Score
from workers.engine.branches import branches_of
from workers.engine.prefix_hashes import prefix_hashes
from workers.engine.requests import Response, SampleResult
from workers.engine.session_record import Node, SessionRecord
from workers.errors import DataError

PARTIAL = ("ids", "log_probs", "versions")
"""Kept fields of an unfinished Response."""
ROWS = ("finished", "turns")
"""Groups of rows in a checkpoint's file, in the order of their images."""
UPDATE_COLUMNS = ("old_log_probs", "reference_log_probs", "advantages")
"""Token columns of an update, those that a step has."""
OF_ANSWERS = ("finish_reason", "read_tokens", "cached_tokens", "stop_string")
"""Further ones of an answer in an unfinished session."""


@dataclass(frozen=True)
class FinishedSample:
    """A result with its rows of tokens (`Episode.rows`), and its score if known. A dropped sample
    lacks rows.
    """

    result: SampleResult
    rows: list[dict[str, np.ndarray]]
    score: Score | None


@dataclass(frozen=True)
class StoredSamples:
    """The content of a file. partial: unfinished responses and sessions, by seed."""

    finished: list[FinishedSample] = field(default_factory=list)
    partial: dict[int, Response | SessionRecord] = field(default_factory=dict)


def _select_fields(response: Response) -> dict[str, Any]:
    return {name: getattr(response, name) for name in PARTIAL}


def _join_parts(node: Node) -> dict[str, np.ndarray]:
    columns = {}
    for name in PARTIAL:
        columns[name] = np.concatenate([getattr(part, name) for part in node.parts])
    return columns


def write_samples(path: Path, samples: StoredSamples) -> None:
    """Write a file and replace `path` when it is complete. Raises OutputError."""
    responses = {
        seed: response
        for seed, response in samples.partial.items()
        if isinstance(response, Response)
    }
    sessions = {
        seed: session
        for seed, session in samples.partial.items()
        if isinstance(session, SessionRecord)
    }
    partial = [_select_fields(response) for response in responses.values()]
    nodes = [node for session in sessions.values() for node in session.nodes]
    turns = [_join_parts(node) for node in nodes]
    routed = {
        f"{ROUTED_EXPERTS}.{row}": node.response.routed_experts
        for row, node in enumerate(nodes)
    }
    records = {
        "finished": [_record(sample) for sample in samples.finished],
        "partial": list(responses),
        "sessions": [
            (seed, session.rewards, [*map(_turn, session.nodes)])
            for seed, session in sessions.items()
        ],
    }
    arrays = {"records": as_bytes(records)} | {
        name: experts for name, experts in routed.items() if experts is not None
    }
    arrays |= pack_rows("turns", DataProto.from_rows(turns))
    arrays |= pack_rows(
        "finished",
        DataProto.from_rows([row for sample in samples.finished for row in sample.rows]),
    )
    images = [
        images
        for sample in samples.finished
        if sample.rows
        for images in _row_images(sample.result)
    ]
    arrays |= _pack_images([*images, *(node.images for node in nodes)])
    arrays |= pack_rows("partial", DataProto.from_rows(partial))
    write_arrays(path, arrays)


def read_samples(path: Path) -> StoredSamples:
    """Read a file. Raises DataError if it is missing or broken."""
    with open_arrays(path) as arrays:
        records = from_bytes(arrays["records"])
        sample_rows, turns = (
            _rows(unpack_rows(name, arrays)) if f"{name}.offsets" in arrays else []
            for name in ROWS
        )
        images = _unpack_images(arrays, len(sample_rows) + len(turns))
        rows = iter(zip(sample_rows, images, strict=False))
        finished = [_read_finished(record, rows) for record in records["finished"]]
        partial = [
            Response(row["ids"], row["log_probs"], row["versions"])
            for row in _rows(unpack_rows("partial", arrays))
        ]
        routed = [arrays.get(f"{ROUTED_EXPERTS}.{number}") for number in range(len(turns))]
        turn_parts = zip(turns, images[len(sample_rows) :], routed, strict=True)
        unfinished: dict[int, Response | SessionRecord] = dict(
            zip(records["partial"], partial, strict=True)
        )
        for seed, rewards, turn_records in records.get("sessions", ()):
            nodes = [_node(record, *next(turn_parts)) for record in turn_records]
            unfinished[seed] = SessionRecord(tuple(nodes), rewards)
        return StoredSamples(finished, unfinished)


def write_step(path: Path, rollout: RolloutBatch) -> None:
    """Write a step's samples and the rows that it trains on, replacing `path` when complete.

    Raises OutputError, and DataError for a value of a record that JSON does not have.
    """
    samples = rollout.samples
    trained = rollout.trained
    row_of = {place: row for row, place in enumerate(rollout.rows.tokens["input_ids"])}
    added = {
        name: column
        for name, column in trained.columns.items()
        if name not in rollout.batch.columns
    }
    arrays = _columns("added", added)
    # Hashes of prefixes and branches follow from the tokens.
    left_out = ("prefix_hashes", "branches", IMAGES)
    columns = {
        name: column for name, column in samples.columns.items() if name not in left_out
    }
    arrays |= {f"columns.{name}": column for name, column in columns.items()}
    arrays["columns.branches"] = np.array(
        [len(branches) for branches in samples["branches"]], dtype=np.int64
    )
    arrays["trained"] = np.array(
        [row_of[place] for place in trained.tokens["input_ids"]], dtype=np.int64
    )
    arrays["scores"] = as_bytes([asdict(score) for score in rollout.by_sample.values()])
    if IMAGES in samples.columns:
        images = []
        for sample_images, branches in zip(
            samples[IMAGES], samples["branches"], strict=True
        ):
            images.append(sample_images)
            images += [branch.images for branch in branches]
        arrays |= _pack_images(images)
    placed_branches = zip(samples.tokens["input_ids"], samples["branches"], strict=True)
    tokens = _fetch_rows(
        [
            (ref, row + n)
            for (ref, _, row), branches in placed_branches
            for n in range(1 + len(branches))
        ]
    )
    write_arrays(path, arrays | pack_rows("tokens", tokens))


def read_step(path: Path, put: Callable[[DataProto], Any] | None = None) -> RolloutBatch:
    """Read the samples of a step. put: stores their tokens and returns a reference, None is `ray.put`.

    Raises DataError for a file that is missing or broken.
    """
    with open_arrays(path) as arrays:
        tokens = unpack_rows("tokens", arrays)
        columns = select_arrays("columns", arrays)
        trained = arrays["trained"]
        columns = (
            dict.fromkeys(
                ("branches", "cut_tokens", "history_refused"), 0 * columns["prompt_tokens"]
            )
            | columns
        )
        objects = {
            name: object_column(values)
            for name, values in from_bytes(arrays["objects"]).items()
        }
        scores = [Score(**values) for values in from_bytes(arrays["scores"])]
        added = select_arrays("added", arrays) | objects
        prompts = columns["prompt_tokens"].tolist()
        branches = columns["branches"]
        images = _unpack_images(arrays, len(tokens))
    ends = np.cumsum(branches + 1)
    first = ends - branches - 1
    hashes = []
    sample_branches = []
    for start, end, prompt in zip(first.tolist(), ends.tolist(), prompts, strict=True):
        rows = [tokens.row(row) for row in range(start, end)]
        hashes.append(_hashes(rows[0], images[start], prompt))
        sample_branches.append(branches_of(rows, prompt, images[start:end]))
    columns["prefix_hashes"] = object_column(hashes)
    columns["branches"] = object_column(sample_branches)
    if any(images):
        columns[IMAGES] = object_column([images[start] for start in first])
    names = [name for name in SAMPLED_COLUMNS if name in tokens.tokens]
    block = (put or ray.put)(tokens)
    samples = RemoteBatch(
        columns, {name: places(name, repeat(block), first.tolist()) for name in names}
    )
    rollout = RolloutBatch(
        samples, dict(zip(_keys(samples), scores, strict=True)), dropped=0, retried=0
    )
    return replace(rollout, trained=rollout.rows.select(trained).with_columns(**added))


def write_update(
    path: Path, batch: RemoteBatch, mini_batches: Sequence[np.ndarray]
) -> None:
    """Write what an update reads of its rows, replacing `path` when complete.

    mini_batches: rows of each, in order. Raises OutputError.
    """
    numbers = np.full(len(batch), -1, np.int64)
    for number, rows in enumerate(mini_batches):
        numbers[rows] = number
    arrays = {"mini_batch": numbers, "length": batch["length"]}
    if "advantages" in batch.columns:
        arrays["advantages"] = batch["advantages"]
    for name in UPDATE_COLUMNS:
        if name in batch.tokens:
            arrays[f"tokens.{name}"] = _fetch_column(batch.tokens[name])
    write_arrays(path, arrays)


def write_log_probs(path: Path, record: UpdateRecord) -> None:
    """Write what an update computed for the rows of `write_update`, replacing `path` when complete.

    Raises OutputError.
    """
    arrays = {
        "tokens.new_log_probs": _fetch_column(record.log_probs),
        "loss_tokens": np.array(record.loss_tokens, np.int64),
    }
    # A skipped optimiser step has no gradient norm.
    for name in dict.fromkeys(name for metrics in record.metrics for name in metrics):
        values = [metrics.get(name, np.nan) for metrics in record.metrics]
        arrays[f"metrics.{name}"] = np.array(values, np.float64)
    write_arrays(path, arrays)


def _fetch_column(column: np.ndarray) -> np.ndarray:
    """Fetch a token column, one row after the other."""
    blocks = fetch_objects(ref for ref, _, _ in column)
    rows = [blocks[ref].row(row)[name] for ref, name, row in column]
    return np.concatenate(rows) if rows else np.empty(0, np.float32)


def write_rows(path: Path, rows: RemoteBatch) -> None:
    """Write rows to train on, with their tokens, replacing `path` when complete. Raises as `write_step`."""
    columns = {
        name: column
        for name, column in rows.columns.items()
        if name not in ("prefix_hashes", IMAGES)
    }
    tokens = _fetch_rows([(ref, row) for ref, _, row in rows.tokens["input_ids"]])
    images = _pack_images(rows.columns.get(IMAGES, ()))
    write_arrays(path, _columns("columns", columns) | pack_rows("tokens", tokens) | images)


def read_rows(path: Path) -> RemoteBatch:
    """Read rows to train on. Raises DataError for a file that is missing or broken."""
    with open_arrays(path) as arrays:
        tokens = unpack_rows("tokens", arrays)
        objects = {
            name: object_column(values)
            for name, values in from_bytes(arrays["objects"]).items()
        }
        columns = select_arrays("columns", arrays) | objects
        prompts = enumerate(columns["prompt_tokens"].tolist())
        images = _unpack_images(arrays, len(tokens))
    columns |= {IMAGES: object_column(images)} if any(images) else {}
    hashes = [_hashes(tokens.row(row), images[row], prompt) for row, prompt in prompts]
    names = [name for name in SAMPLED_COLUMNS if name in tokens.tokens]
    return RemoteBatch.of_block(
        ray.put(tokens), columns | {"prefix_hashes": object_column(hashes)}, names
    )


def _columns(group: str, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of a file: numbers and texts by name, and `objects`. Raises DataError for what JSON
    lacks.
    """
    objects = {
        name: column.tolist()
        for name, column in columns.items()
        if column.dtype.kind == "O"
    }
    try:
        arrays = {"objects": as_bytes(objects)}
    except TypeError as error:
        raise DataError(
            f"algorithm.loss.columns={','.join(objects)}: a column cannot be kept in a file: {error}. Give "
            "it as numbers or text."
        ) from None
    return arrays | {
        f"{group}.{name}": column for name, column in columns.items() if name not in objects
    }


def _keys(samples: RemoteBatch) -> list[tuple[str, int]]:
    return list(zip(samples["uid"].tolist(), samples["sample"].tolist(), strict=True))


def _fetch_rows(rows: Sequence[tuple[Any, int]]) -> DataProto:
    """Fetch rows of tokens, each by the reference and the row of its block."""
    blocks = fetch_objects(ref for ref, _ in rows)
    return DataProto.from_rows([blocks[ref].row(row) for ref, row in rows])


def _row_images(result: SampleResult) -> list[Placed]:
    return [result.images, *(branch.images for branch in result.branches)]


def _pack_images(rows: Iterable[Placed]) -> dict[str, np.ndarray]:
    """Return the places of images as JSON by row, and each content once, by digest."""
    image_rows = fetch_images(object_column(list(rows))).tolist()
    if not any(image_rows):
        return {}
    contents = {
        placed_image.image.digest: placed_image.image
        for images in image_rows
        for placed_image in images
    }
    places = []
    for images in image_rows:
        places.append(
            [(placed.image.digest, placed.first, placed.tokens) for placed in images]
        )
    sizes = {digest: (image.width, image.height) for digest, image in contents.items()}
    packed = {
        f"image.{digest}": np.frombuffer(image.data, np.uint8)
        for digest, image in contents.items()
    }
    return {IMAGES: as_bytes({"places": places, "sizes": sizes})} | packed


def _unpack_images(arrays: Mapping[str, np.ndarray], count: int) -> list[Placed]:
    """Return the images of `count` rows, in the object store."""
    if IMAGES not in arrays:
        return [()] * count
    index = from_bytes(arrays[IMAGES])
    data = select_arrays("image", arrays)
    images = {
        digest: Image(int(digest), width, height, ray.put(data[digest].tobytes()))
        for digest, (width, height) in index["sizes"].items()
    }
    image_rows = []
    for row in index["places"]:
        image_rows.append(
            tuple(PlacedImage(images[f"{digest}"], *place) for digest, *place in row)
        )
    return image_rows


def _hashes(row: Mapping[str, np.ndarray], images: Placed, prompt: int) -> bytes:
    return prefix_hashes(keys(row["input_ids"], images), prompt)


def _record(sample: FinishedSample) -> dict[str, Any]:
    score = None if sample.score is None else asdict(sample.score)
    result = asdict(replace(sample.result, images=(), branches=()))
    # They follow from the rows, as do the branches.
    del (result["prefix_hashes"], result["images"])
    result["branches"] = len(sample.result.branches)
    return {"result": result, "score": score}


def _read_finished(
    record: Mapping[str, Any], rows: Iterable[tuple[dict[str, np.ndarray], Placed]]
) -> FinishedSample:
    values = dict(record["result"])
    environment = values.pop("environment")
    branches = values.pop("branches", 0)
    versions = tuple((version, tokens) for version, tokens in values.pop("version_tokens"))
    result = SampleResult(
        **values, version_tokens=versions, environment=_score(environment)
    )
    pairs = [next(iter(rows)) for _ in range(1 + branches)] if result.row >= 0 else []
    sample_rows = [row for row, _ in pairs]
    images = [placed for _, placed in pairs]
    if sample_rows:
        hashes = _hashes(sample_rows[0], images[0], result.prompt_tokens)
        following = branches_of(sample_rows, result.prompt_tokens, images)
        result = replace(result, prefix_hashes=hashes, branches=following, images=images[0])
    return FinishedSample(result, sample_rows, _score(record["score"]))


def _turn(node: Node) -> dict[str, Any]:
    """Return a turn of a session without its tokens."""
    facts = {
        node_field.name: getattr(node, node_field.name)
        for node_field in fields(Node)
        if node_field.name not in ("response", "images")
    }
    return facts | {
        "given": len(node.given),
        "response": {name: getattr(node.response, name) for name in OF_ANSWERS},
    }


def _node(
    turn: Mapping[str, Any],
    row: Mapping[str, np.ndarray],
    images: Placed,
    routed: np.ndarray | None,
) -> Node:
    answer: dict[str, Any] = {name: row[name][turn["given"] :] for name in PARTIAL} | turn[
        "response"
    ]
    answer[ROUTED_EXPERTS] = routed
    return Node(
        **{
            **turn,
            "given": row["ids"][: turn["given"]],
            "images": images,
            "response": Response(**answer),
        }
    )


def _score(values: Mapping[str, Any] | None) -> Score | None:
    return None if values is None else Score(**values)


def _rows(block: DataProto) -> list[dict[str, np.ndarray]]:
    return [block.row(index) for index in range(len(block))]
