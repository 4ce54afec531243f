"""RemoteBatch: the driver's handle on a batch whose tokens stay where they were made.

    rollout actor --DataProto--> object store <--(reference, row)-- RemoteBatch on the driver
                                       |
    policy worker <---- gather() ------+         (zero-copy on one node, only the rows it needs)

The driver selects, reorders and joins rows by index arithmetic; it never reads a token.
Shapes: B sequences, T tokens of all rows of a block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.dataproto import DataProto
from workers.errors import DataError

if TYPE_CHECKING:
    from ray import ObjectRef


@dataclass(frozen=True)
class TokenColumn:
    """References to the rows of one token column: row i is row `row[i]` of column `name` in `blocks[block[i]]`.

    block, row: int32 [B].
    """

    name: str
    blocks: tuple["ObjectRef", ...]
    block: np.ndarray
    row: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    def select(self, indices: np.ndarray) -> "TokenColumn":
        """The rows `indices`, holding only the blocks that these need (one, for its dtype, where there are no rows)."""
        if len(indices) == 0:
            return TokenColumn(self.name, self.blocks[:1], self.block[:0], self.row[:0])
        used, block = np.unique(self.block[indices], return_inverse=True)
        blocks = tuple(self.blocks[i] for i in used)
        return TokenColumn(self.name, blocks, block.astype(np.int32), self.row[indices])

    @staticmethod
    def concat(parts: Sequence["TokenColumn"]) -> "TokenColumn":
        """Rows of `parts` one after another; a block that several parts hold is kept once."""
        blocks: dict[ObjectRef, int] = {}
        block = []
        for part in parts:
            renumbered = np.array([blocks.setdefault(ref, len(blocks)) for ref in part.blocks], dtype=np.int32)
            block.append(renumbered[part.block])
        rows = np.concatenate([part.row for part in parts])
        return TokenColumn(parts[0].name, tuple(blocks), np.concatenate(block), rows)


@dataclass(frozen=True)
class RemoteBatch:
    """B sequences: light per-sequence columns in memory, token columns as references.

    columns: name -> array [B] (uid, length, reward, weight_version, ...). tokens: name -> TokenColumn. meta: facts
    about the whole batch, such as the step; it travels with every selection.
    Immutable: every method returns a new handle and moves no token.
    """

    columns: dict[str, np.ndarray]
    tokens: dict[str, TokenColumn]
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = {name: len(column) for name, column in (self.columns | self.tokens).items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"the columns of a RemoteBatch must have one length, got {sizes}.")

    def __len__(self) -> int:
        return len(next(iter((self.columns | self.tokens).values()), ()))

    def __getitem__(self, name: str) -> np.ndarray:
        """The light column `name`, [B]."""
        if name not in self.columns:
            raise DataError(f"this batch has no column {name!r}; it has {sorted(self.columns)}.")
        return self.columns[name]

    def select(self, indices: Any) -> "RemoteBatch":
        """The rows `indices` (integers or a boolean mask), in that order."""
        indices = np.asarray(indices)
        if indices.dtype == bool:
            if len(indices) != len(self):
                raise DataError(f"a mask of {len(indices)} rows cannot select from a batch of {len(self)}.")
            indices = np.flatnonzero(indices)
        indices = indices.astype(np.int64)
        outside = indices[(indices < 0) | (indices >= len(self))]
        if len(outside):
            raise DataError(f"row {outside[0]} is outside a batch of {len(self)} rows.")
        return RemoteBatch(
            {name: column[indices] for name, column in self.columns.items()},
            {name: column.select(indices) for name, column in self.tokens.items()},
            self.meta,
        )

    def with_columns(self, **columns: np.ndarray) -> "RemoteBatch":
        """This batch with light columns added or replaced."""
        return replace(self, columns=self.columns | columns)

    def with_tokens(self, **tokens: TokenColumn) -> "RemoteBatch":
        """This batch with token columns added or replaced."""
        return replace(self, tokens=self.tokens | tokens)

    def with_meta(self, **meta: Any) -> "RemoteBatch":
        """This batch with meta data added or replaced."""
        return replace(self, meta=self.meta | meta)

    @staticmethod
    def concat(batches: Sequence["RemoteBatch"]) -> "RemoteBatch":
        """Rows of `batches` one after another. Raises DataError if their columns or their meta data differ."""
        if not batches:
            raise DataError("cannot concatenate zero batches.")
        for batch in batches[1:]:
            if set(batch.columns) != set(batches[0].columns) or set(batch.tokens) != set(batches[0].tokens):
                names = [sorted(set(b.columns) | set(b.tokens)) for b in (batches[0], batch)]
                raise DataError(f"batches with different columns cannot be joined: {names[0]} and {names[1]}.")
            if batch.meta != batches[0].meta:
                raise DataError(f"batches with different meta data cannot be joined: {batches[0].meta}, {batch.meta}.")
        return RemoteBatch(
            {name: np.concatenate([b.columns[name] for b in batches]) for name in batches[0].columns},
            {name: TokenColumn.concat([b.tokens[name] for b in batches]) for name in batches[0].tokens},
            batches[0].meta,
        )

    def gather(self) -> DataProto:
        """Fetch the rows into a DataProto of tensors.

        Runs in the worker that needs the tokens. Raises DataError if the token columns disagree about a row's length.
        """
        import ray

        refs = list(dict.fromkeys(ref for column in self.tokens.values() for ref in column.blocks))
        fetched = dict(zip(refs, ray.get(refs), strict=True))
        packed = {
            name: _packed(column, [fetched[ref] for ref in column.blocks]) for name, column in self.tokens.items()
        }
        lengths = _common_lengths({name: found for name, (_, found) in packed.items()})
        tokens = {name: values for name, (values, _) in packed.items()}
        return DataProto(lengths, tokens, self.columns, meta=self.meta).as_tensors()


def _packed(column: TokenColumn, blocks: list[DataProto]) -> tuple[np.ndarray, np.ndarray]:
    """Values [T] of the column's rows, concatenated, and their lengths, int64 [B]."""
    sources = [(block.tokens[column.name], block.offsets) for block in blocks]
    rows = []
    for block, row in zip(column.block, column.row, strict=True):
        values, offsets = sources[block]
        rows.append(values[offsets[row] : offsets[row + 1]])
    empty = sources[0][0][:0]
    return np.concatenate([empty, *rows]), np.array([len(row) for row in rows], dtype=np.int64)


def _common_lengths(lengths: Mapping[str, np.ndarray]) -> np.ndarray:
    """int64 [B], the row lengths of all token columns. Raises DataError naming the first row that differs."""
    first = next(iter(lengths))
    for name, column in lengths.items():
        if not np.array_equal(column, lengths[first]):
            row = np.flatnonzero(column != lengths[first])[0]
            raise DataError(f"token columns {first!r} and {name!r} differ in length at row {row}.")
    return lengths[first]
