"""RemoteBatch: the driver's handle on a batch whose tokens stay where they were made.

    rollout actor --DataProto--> object store <--(block, column, row)-- RemoteBatch on the driver
                                       |
    policy worker <---- gather() ------+         (zero-copy on one node, only the rows it needs)

The driver selects, reorders and joins rows by index arithmetic. It never reads a token.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.batch.dataproto import DataProto, object_column, wrong_length
from workers.batch.placed_images import Image, PlacedImage
from workers.errors import DataError, LostError, clause

if TYPE_CHECKING:
    from ray import ObjectRef


IMAGES = "images"
"""Column of the images in each sequence, objects [B] of `PlacedImage` tuples. Batches without
images lack it.
"""


def store_images(
    images: Iterable[PlacedImage], refs: dict[int, "ObjectRef"]
) -> tuple[PlacedImage, ...]:
    """Put images into the object store, each content once. refs: references by digest, extended."""
    import ray

    def put(image: Image) -> Image:
        if isinstance(image.data, ray.ObjectRef):
            return image
        if image.digest not in refs:
            refs[image.digest] = ray.put(image.png())
        return replace(image, data=refs[image.digest])

    return tuple(
        replace(placed_image, image=put(placed_image.image)) for placed_image in images
    )


def fetch_objects(refs: Iterable[Any]) -> dict[Any, Any]:
    """Fetch objects by their references, each once. Raises LostError if the node that held one is gone."""
    import ray

    names = list(dict.fromkeys(refs))
    if not names:  # a call with none would start a Ray
        return {}
    try:
        return dict(zip(names, ray.get(names), strict=True))
    except ray.exceptions.RayError as error:
        raise LostError(f"tokens were on a node that was lost: {clause(error)}") from error


def fetch_images(column: np.ndarray) -> np.ndarray:
    """Return a column of images with their PNG bytes, each content fetched once."""
    import ray

    data = {
        placed_image.image.digest: placed_image.image.data
        for images in column
        for placed_image in images
    }
    refs = {
        digest: content
        for digest, content in data.items()
        if isinstance(content, ray.ObjectRef)
    }
    contents = fetch_objects(refs.values())
    data |= {digest: contents[ref] for digest, ref in refs.items()}

    def read(placed_image: PlacedImage) -> PlacedImage:
        return replace(
            placed_image,
            image=replace(placed_image.image, data=data[placed_image.image.digest]),
        )

    return object_column([tuple(map(read, images)) for images in column])


def places(column: str, blocks: Iterable["ObjectRef"], rows: Iterable[int]) -> np.ndarray:
    """A token column of a RemoteBatch, objects [B]: a DataProto's reference, column and row for each
    sequence.
    """
    return object_column(list(zip(blocks, repeat(column), rows, strict=False)))


@dataclass(frozen=True)
class RemoteBatch:
    """B sequences: light per-sequence columns in memory, token columns as references.

    columns: name -> array [B] (uid, length, reward, ...). tokens: name -> `places`. meta: facts about the
    whole batch. Immutable: every method returns a new handle and moves no token.
    """

    columns: dict[str, np.ndarray]
    tokens: dict[str, np.ndarray]
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = {name: len(column) for name, column in (self.columns | self.tokens).items()}
        if wrong := wrong_length(sizes):
            raise DataError(
                f"column {wrong[0]!r} has {sizes[wrong[0]]} rows, but {wrong[1]!r} has {sizes[wrong[1]]}."
            )

    @staticmethod
    def of_block(
        block: "ObjectRef", columns: dict[str, np.ndarray], tokens: Sequence[str]
    ) -> "RemoteBatch":
        rows = len(next(iter(columns.values())))
        return RemoteBatch(
            columns, {name: places(name, repeat(block), range(rows)) for name in tokens}
        )

    def __len__(self) -> int:
        return len(next(iter((self.columns | self.tokens).values()), ()))

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.columns:
            raise DataError(
                f"this batch has no column {name!r}. It has {sorted(self.columns)}."
            )
        return self.columns[name]

    def select(self, indices: Any) -> "RemoteBatch":
        """Select rows by integers or a boolean mask, in that order."""
        indices = np.asarray(indices)
        if indices.dtype == bool:
            if len(indices) != len(self):
                raise DataError(
                    f"a mask of {len(indices)} rows cannot select from a batch of {len(self)}."
                )
            indices = np.flatnonzero(indices)
        indices = indices.astype(np.int64)
        outside = indices[(indices < 0) | (indices >= len(self))]
        if len(outside):
            raise DataError(f"row {outside[0]} is outside a batch of {len(self)} rows.")
        return RemoteBatch(
            {name: column[indices] for name, column in self.columns.items()},
            {name: column[indices] for name, column in self.tokens.items()},
            self.meta,
        )

    def with_columns(self, **columns: np.ndarray) -> "RemoteBatch":
        return replace(self, columns=self.columns | columns)

    def with_tokens(self, **tokens: np.ndarray) -> "RemoteBatch":
        return replace(self, tokens=self.tokens | tokens)

    def with_meta(self, **meta: Any) -> "RemoteBatch":
        return replace(self, meta=self.meta | meta)

    @property
    def light(self) -> "RemoteBatch":
        """The columns without anything that the object store holds."""
        return RemoteBatch(
            {name: column for name, column in self.columns.items() if name != IMAGES}, {}
        )

    @staticmethod
    def concat(batches: Sequence["RemoteBatch"]) -> "RemoteBatch":
        """Join batches row-wise. Raises DataError if columns or meta data differ."""
        if not batches:
            raise DataError("cannot concatenate zero batches.")
        if any(IMAGES in batch.columns for batch in batches):
            batches = [
                batch
                if IMAGES in batch.columns
                else batch.with_columns(images=object_column([()] * len(batch)))
                for batch in batches
            ]
        for batch in batches[1:]:
            if set(batch.columns) != set(batches[0].columns) or set(batch.tokens) != set(
                batches[0].tokens
            ):
                names = [
                    sorted(set(b.columns) | set(b.tokens)) for b in (batches[0], batch)
                ]
                raise DataError(
                    f"batches with different columns cannot be joined: {names[0]} and {names[1]}."
                )
            if batch.meta != batches[0].meta:
                raise DataError(
                    f"batches with different meta data cannot be joined: {batches[0].meta}, {batch.meta}."
                )
        return RemoteBatch(
            _concatenate([batch.columns for batch in batches]),
            _concatenate([batch.tokens for batch in batches]),
            batches[0].meta,
        )

    def gather(self, unread: Collection[str] = ()) -> DataProto:
        """Fetch the rows as tensors, in the worker that needs them, without the columns `unread`. Raises
        DataError if rows differ in length, and LostError.
        """
        read = {name: column for name, column in self.tokens.items() if name not in unread}
        blocks = fetch_objects(ref for column in read.values() for ref, _, _ in column)
        rows = {name: _rows(column, blocks) for name, column in read.items()}
        lengths = {}
        for name, token_rows in rows.items():
            lengths[name] = np.array([len(row) for row in token_rows], dtype=np.int64)
        first = next(iter(lengths))
        for name, row_lengths in lengths.items():
            if not np.array_equal(row_lengths, lengths[first]):
                row = np.flatnonzero(row_lengths != lengths[first])[0]
                raise DataError(
                    f"column {name!r} has {row_lengths[row]} tokens in row {row}, but {first!r} has "
                    f"{lengths[first][row]}."
                )
        # A rank may have no rows.
        empty = {
            name: np.empty(
                0, np.int32 if name in ("input_ids", "loss_mask") else np.float32
            )
            for name in rows
        }
        tokens = {
            name: np.concatenate(token_rows) if token_rows else empty[name]
            for name, token_rows in rows.items()
        }
        images = (
            {IMAGES: fetch_images(self.columns[IMAGES])} if IMAGES in self.columns else {}
        )
        return DataProto(
            lengths[first], tokens, self.columns | images, meta=self.meta
        ).as_tensors()


def _concatenate(tables: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    columns = {}
    for name in tables[0]:
        columns[name] = np.concatenate([table[name] for table in tables])
    return columns


def _rows(column: np.ndarray, blocks: dict["ObjectRef", DataProto]) -> list[np.ndarray]:
    rows = []
    for ref, name, row in column:
        block = blocks[ref]
        rows.append(block.tokens[name][block.offsets[row] : block.offsets[row + 1]])
    return rows
