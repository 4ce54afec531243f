"""The samples of a step in a file, from which `controller.replay` trains the step again.

    Collected --step_samples--> StepSamples --write_step--> runs/NAME/samples/step-3.npz
    Collected <--collected----- StepSamples <--read_step---'

Tokens of all samples, as engines returned them, and their light columns; the rows that the step trains on, in its
order, and the columns that these have beside. Numbers and text alone: no file is read with pickle.
"""

import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import ray
from ray import ObjectRef

from controller.collector import Collected
from controller.sample_files import as_bytes, from_bytes, named, packed, unpacked, write_arrays
from controller.samples import SAMPLED_COLUMNS, Rollout
from workers.dataproto import DataProto, object_column
from workers.errors import DataError
from workers.remote_batch import RemoteBatch
from workers.rollout.prefix_hashes import prefix_hashes
from workers.score import Score


@dataclass(frozen=True)
class StepSamples:
    """All samples of a step, B of them, of which b are trained.

    tokens: B rows, see `RolloutWorker.generate`. columns: the light columns of `Rollout.samples`, [B]. scores: B.
    trained: int64 [b], rows in the order in which the step trains on them. added: columns of the trained samples alone,
    [b]: numbers, or objects that JSON has.
    """

    tokens: DataProto
    columns: dict[str, np.ndarray]
    scores: list[Score]
    trained: np.ndarray
    added: dict[str, np.ndarray]

    def collected(self, block: ObjectRef) -> Collected:
        """The collector's samples of a step. block: a reference to `tokens`."""
        columns = self.columns | {"prefix_hashes": self._prefix_hashes()}
        kept = [name for name in SAMPLED_COLUMNS if name in self.tokens.tokens]
        samples = RemoteBatch.of_block(block, columns, kept)
        rollout = Rollout(samples, dict(zip(_keys(samples), self.scores, strict=True)), dropped=0, retried=0)
        return Collected(rollout, rollout.batch.select(self.trained).with_columns(**self.added))

    def _prefix_hashes(self) -> np.ndarray:
        """Objects [B], bytes: they follow from the tokens, so that no file has them."""
        prompts = self.columns["prompt_tokens"].tolist()
        ids = [self.tokens.row(row)["input_ids"] for row in range(len(self.tokens))]
        return object_column([prefix_hashes(*pair) for pair in zip(ids, prompts, strict=True)])


def step_samples(collected: Collected) -> StepSamples:
    """The samples of a step, their tokens fetched from the object store."""
    rollout, batch = collected.rollout, collected.batch
    row_of = {key: row for row, key in enumerate(_keys(rollout.samples))}
    return StepSamples(
        _fetched(rollout.samples.tokens["input_ids"]),
        {name: column for name, column in rollout.samples.columns.items() if name != "prefix_hashes"},
        list(rollout.by_sample.values()),
        np.array([row_of[key] for key in _keys(batch)], dtype=np.int64),
        {name: column for name, column in batch.columns.items() if name not in rollout.batch.columns},
    )


def write_step(path: Path, samples: StepSamples) -> None:
    """Write a file that replaces `path` when it is complete.

    Raises OutputError, and DataError for a value of a record that JSON does not have.
    """
    numbers = {name: column for name, column in samples.added.items() if column.dtype.kind != "O"}
    objects = {name: column.tolist() for name, column in samples.added.items() if name not in numbers}
    arrays = packed("tokens", samples.tokens) | _prefixed("columns", samples.columns) | _prefixed("added", numbers)
    try:
        arrays |= {"objects": as_bytes(objects), "scores": as_bytes([asdict(score) for score in samples.scores])}
    except TypeError as error:
        raise DataError(
            f"run.record_samples cannot keep a column of algorithm.loss.columns={','.join(objects)}: {error}; give it "
            "as numbers or text."
        ) from None
    write_arrays(path, arrays | {"trained": samples.trained})


def read_step(path: Path) -> StepSamples:
    """The content of a file. Raises DataError for one that is missing or broken."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            objects = {name: object_column(values) for name, values in from_bytes(arrays["objects"]).items()}
            return StepSamples(
                unpacked("tokens", arrays),
                named("columns", arrays),
                [Score(**values) for values in from_bytes(arrays["scores"])],
                arrays["trained"],
                named("added", arrays) | objects,
            )
    except (OSError, ValueError, KeyError, TypeError, BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read as the samples of a step: {error}") from None


def _keys(samples: RemoteBatch) -> list[tuple[str, int]]:
    return list(zip(samples["uid"].tolist(), samples["sample"].tolist(), strict=True))


def _fetched(places: np.ndarray) -> DataProto:
    """All columns of the rows at these places."""
    refs = list(dict.fromkeys(ref for ref, _, _ in places))
    blocks = dict(zip(refs, ray.get(refs), strict=True))
    return DataProto.from_rows([blocks[ref].row(row) for ref, _, row in places])


def _prefixed(name: str, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}.{column}": values for column, values in columns.items()}
