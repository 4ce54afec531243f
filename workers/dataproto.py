"""DataProto: the batch that a worker receives.

    DataProto
      batch             TensorDict            input_ids [B, j] jagged, scores [B], ...
      non_tensor_batch  name -> object array  uid [B], ...
      meta_info         name -> anything      facts about the whole batch

Rows (B of them) are the first dimension of every column. Per-token columns are jagged (`torch.nested`, layout
`torch.jagged`, ragged in dimension 1), so nothing is padded. Jagged columns whose rows have the same lengths share one
offsets tensor: two of them multiply as they are, and `batch["input_ids"].values()` is the packed row of all tokens.

Names and meaning follow verl's `DataProto`; docs/migration.md has what is not here. `reorder`, `union` and `to` change
the object itself; every other method returns a new one, whose tensors may be views. No method changes its arguments.
A DataError names the column and the sizes that are wrong.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from workers import dataproto_columns as columns
from workers.dataproto_columns import RowNumbers, RowSelection
from workers.errors import DataError


@dataclass(eq=False, repr=False)
class DataProto:
    """A batch of rows: tensor columns, non-tensor columns and facts about the whole.

    batch: columns of one row count (its batch size), plain [B, ...] or jagged [B, j, ...]; None without any.
    non_tensor_batch: NumPy arrays [B, ...], usually of objects.
    meta_info: anything, not per row.

    Raises DataError if the parts do not fit one another, as `check_consistency` does.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    # --- construction -------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> "DataProto":
        """A batch of the given columns, not copied (except jagged ones with gaps between rows).

        non_tensors: arrays, or lists with one item a row (a row that is itself a list stays one object).
        """
        return cls(
            columns.make_batch(tensors) if tensors else None,
            {key: columns.object_column(key, value) for key, value in (non_tensors or {}).items()},
            dict(meta_info or {}),
        )

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None) -> "DataProto":
        """The reverse of `to_tensordict`: `NonTensorStack` entries become object arrays, `NonTensorData` meta_info.

        Raises DataError if meta_info contradicts such an entry.
        """
        if not isinstance(tensor_dict, TensorDict):
            raise DataError(f"a {type(tensor_dict).__name__} was given where a TensorDict is due")
        tensors: dict[str, torch.Tensor] = {}
        arrays: dict[str, np.ndarray] = {}
        meta: dict[str, Any] = {}
        for key, value in tensor_dict.items():
            if isinstance(value, NonTensorStack):
                arrays[key] = columns.object_column(key, [item.tolist() for item in value.unbind(0)])
            elif isinstance(value, NonTensorData):
                meta[key] = value.data
            else:
                tensors[key] = value
        return cls.from_dict(tensors, arrays, columns.merge_meta([meta, meta_info or {}]))

    def to_tensordict(self) -> TensorDict:
        """One TensorDict: object columns as `NonTensorStack`, meta_info as `NonTensorData`.

        Raises DataError if a key of meta_info is also a column's name.
        """
        twice = sorted(self.meta_info.keys() & {*self._keys("batch"), *self.non_tensor_batch})
        if twice:
            raise DataError(f"{twice[0]!r} names a column and a key of meta_info; rename one before to_tensordict")
        entries: dict[str, Any] = dict(self.batch.items()) if self.batch is not None else {}
        for key, column in self.non_tensor_batch.items():
            entries[key] = NonTensorStack(*[NonTensorData(value) for value in column])
        for key, value in self.meta_info.items():
            entries[key] = NonTensorData(value)
        return TensorDict(entries, batch_size=[len(self)])

    def check_consistency(self) -> None:
        """Raise DataError unless all columns have the same number of rows and a form that every method can handle."""
        rows: dict[str, int] = {}
        names = self._keys("batch")
        if self.batch is not None:
            columns.check_batch(self.batch)
            rows[f"the batch of tensors {names}"] = len(self)
        for key, column in self.non_tensor_batch.items():
            columns.check_array_column(key, column)
            if key in names:
                raise DataError(f"column {key!r} stands in batch and in non_tensor_batch; rename one of them")
            rows[f"non_tensor_batch[{key!r}]"] = column.shape[0]
        columns.check_same_rows(rows)

    def __getstate__(self) -> dict[str, Any]:
        # A view would be pickled with its whole storage: each of eight chunks as large as all eight.
        return {**self.__dict__, "batch": None if self.batch is None else columns.without_views(self.batch)}

    def _keys(self, place: str) -> list[str]:
        holder = getattr(self, place)
        return [] if holder is None else list(holder.keys())

    # --- rows ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Rows; 0 if there are no columns."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((column.shape[0] for column in self.non_tensor_batch.values()), 0)

    def __repr__(self) -> str:
        """The row count, and a line with type and sizes for every column and key of meta_info."""
        lines = [f"DataProto of {len(self)} rows"]
        for place in ("batch", "non_tensor_batch", "meta_info"):
            lines.append(place)
            lines += [f"  {key}: {columns.describe(getattr(self, place)[key])}" for key in self._keys(place)]
        return "\n".join(lines)

    def __getitem__(self, rows: RowSelection) -> "DataProto":
        """The rows that a slice, list, array, tensor or boolean mask selects; see `slice` and `select_idxs`."""
        return self.slice(rows.start, rows.stop, rows.step) if isinstance(rows, slice) else self.select_idxs(rows)

    def select_idxs(self, idxs: RowNumbers) -> "DataProto":
        """The rows with these numbers (negative ones count from the end), in this order, repeated where repeated.

        Raises DataError for a row that does not exist, or another kind of index.
        """
        return self._take(columns.row_numbers(idxs, len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> "DataProto":
        """The rows `start:end:step`; with step 1 as views."""
        try:
            first, stop, stride = slice(start, end, step).indices(len(self))
        except (TypeError, ValueError) as error:
            raise DataError(f"rows cannot be sliced by {start}:{end}:{step}: {error}") from error
        if stride == 1:
            return self._take(slice(first, max(first, stop)))
        return self.select_idxs(range(first, stop, stride))

    def _take(self, rows: Any) -> "DataProto":
        """New DataProto of rows given by a slice or by a tensor of non-negative row numbers."""
        # copy() is shallow: a full slice of a TensorDict is the TensorDict itself.
        batch = None if self.batch is None else self.batch[rows].copy()
        places = rows if isinstance(rows, slice) else rows.numpy()
        arrays = {key: column[places] for key, column in self.non_tensor_batch.items()}
        return DataProto(batch, arrays, dict(self.meta_info))

    def reorder(self, indices: RowNumbers) -> None:
        """Put row `indices[i]` in place i, here. Raises DataError unless indices are a permutation of all rows."""
        numbers = columns.row_numbers(indices, len(self))
        if not torch.equal(numbers.sort().values, torch.arange(len(self))):
            raise DataError(
                f"{len(numbers)} indices are not a permutation of {len(self)} rows; select_idxs drops and repeats rows"
            )
        ordered = self._take(numbers)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Every row `repeat_times` times: copies of a row side by side (0 0 1 1) or, not interleaved, 0 1 0 1."""
        columns.check_positive("repeat_times", repeat_times)
        numbers = torch.arange(len(self))
        return self._take(numbers.repeat_interleave(repeat_times) if interleave else numbers.repeat(repeat_times))

    def chunk(self, chunks: int) -> list["DataProto"]:
        """Exactly `chunks` parts in row order, whose sizes differ by at most one, larger parts first; some may be
        empty."""
        columns.check_positive("chunks", chunks)
        size, larger = divmod(len(self), chunks)
        starts = [part * size + min(part, larger) for part in range(chunks + 1)]
        return [self.slice(start, stop) for start, stop in pairwise(starts)]

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """The rows of all parts, one part after another; meta_info holds the keys of all.

        Raises DataError if nothing is given, if a column is missing somewhere or differs in dtype, device or row shape,
        or if a key of meta_info has two values.
        """
        if not data:
            raise DataError("concat needs at least one DataProto")
        return DataProto(
            columns.concat_tensors([part.batch for part in data]),
            columns.concat_arrays([part.non_tensor_batch for part in data]),
            columns.merge_meta(part.meta_info for part in data),
        )

    # --- columns ------------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> "DataProto":
        """These columns and keys, not copied; None stands for all. Raises DataError for one that is missing."""
        batch = self._chosen("batch", batch_keys)
        arrays = self._chosen("non_tensor_batch", non_tensor_batch_keys)
        return DataProto(
            None if self.batch is None else self.batch.select(*batch),
            {key: self.non_tensor_batch[key] for key in arrays},
            {key: self.meta_info[key] for key in self._chosen("meta_info", meta_info_keys)},
        )

    def _chosen(self, place: str, keys: Iterable[str] | None) -> list[str]:
        """The keys without repetition; one key may come without a list around it."""
        known = self._keys(place)
        chosen = known if keys is None else [keys] if isinstance(keys, str) else list(dict.fromkeys(keys))
        for key in chosen:
            if key not in known:
                raise DataError(f"{place} has no {key!r}, only {known}")
        return chosen

    def union(self, other: "DataProto") -> "DataProto":
        """Add the columns and meta_info of `other`, row by row, here; returns self.

        Raises DataError, and adds nothing, if row counts differ or a name that both have holds different values
        (NaN equals itself).
        """
        parts = {"self": self, "other": other}
        columns.check_same_rows({name: len(part) for name, part in parts.items() if part._has_columns()})
        joined = DataProto(
            columns.union_batches(self.batch, other.batch),
            columns.union_columns("non_tensor_batch", self.non_tensor_batch, other.non_tensor_batch),
            columns.merge_meta([self.meta_info, other.meta_info]),
        )
        self.batch, self.non_tensor_batch, self.meta_info = joined.batch, joined.non_tensor_batch, joined.meta_info
        return self

    def _has_columns(self) -> bool:
        """A batch without any columns has no row count of its own."""
        return self.batch is not None or bool(self.non_tensor_batch)

    def to(self, device: torch.device | str) -> "DataProto":
        """Move the tensor columns to a device, here; returns self."""
        if self.batch is not None:
            self.batch = columns.with_shared_offsets(self.batch.to(device))
        return self
