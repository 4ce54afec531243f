"""DataProto: the batch that a worker receives and returns.

    DataProto
      batch             TensorDict            input_ids [B, j] jagged, scores [B], ...
      non_tensor_batch  name -> object array  uid [B], ...
      meta_info         name -> anything      what is true of the whole batch

    dispatch: chunk(ranks) -> worker calls -> concat(results) -> union with the batch

Rows (B of them) are the first dimension of every column; per-token columns are jagged (`torch.nested`, layout
`torch.jagged`, ragged in dimension 1), so nothing is padded. Jagged columns whose rows have the same lengths share one
offsets tensor: two of them multiply as they are, and `batch["input_ids"].values()` is the packed row of all tokens.

Names and meaning follow verl's `DataProto`. `reorder`, `pop`, `rename`, `union` and `to` act on the object itself;
everything else returns a new one, whose tensors may be views, as when slicing a tensor. No call changes its arguments.
What is wrong with a batch is a `DataError` that names the column and the sizes.
"""

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, overload

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import DataLoader

from workers import dataproto_columns as columns
from workers import dataproto_io
from workers.dataproto_columns import RowNumbers, RowSelection
from workers.errors import DataError


@dataclass(eq=False)
class DataProtoItem:
    """One row: tensors without the row dimension (a jagged column gives the row's own tokens), one object a column."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class DataProto:
    """A batch of rows: tensor columns, non-tensor columns and facts about the whole.

    batch: columns of one row count (its batch size), plain [B, ...] or jagged [B, j, ...]; None without any.
    non_tensor_batch: NumPy arrays [B, ...], in general of objects.
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
        num_batch_dims: int = 1,
    ) -> "DataProto":
        """A batch of the given columns; nothing is copied.

        non_tensors: arrays, or lists with one item a row (a row that is itself a list stays one object).
        num_batch_dims: leading dimensions that all tensors have in common, the first of which counts rows.
        """
        return cls(
            columns.make_batch(tensors, num_batch_dims) if tensors else None,
            {key: columns.object_column(key, value) for key, value in (non_tensors or {}).items()},
            dict(meta_info or {}),
        )

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, torch.Tensor | np.ndarray], meta_info: Mapping[str, Any] | None = None
    ) -> "DataProto":
        """As `from_dict`, from one dict in which tensors and NumPy arrays are mixed."""
        for key, value in data.items():
            if not isinstance(value, (torch.Tensor, np.ndarray)):
                raise DataError(f"column {key!r} is a {type(value).__name__}, neither a tensor nor a NumPy array")
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        arrays = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1
    ) -> "DataProto":
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
        return cls.from_dict(tensors, arrays, columns.merge_meta([meta, meta_info or {}]), num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """One TensorDict: object columns as `NonTensorStack`, meta_info as `NonTensorData`.

        Raises DataError if a key of meta_info is also a column's name.
        """
        twice = sorted(self.meta_info.keys() & self._column_names())
        if twice:
            raise DataError(f"{twice[0]!r} names a column and a key of meta_info; rename one before to_tensordict")
        entries: dict[str, Any] = dict(self.batch.items()) if self.batch is not None else {}
        for key, column in self.non_tensor_batch.items():
            entries[key] = NonTensorStack(*[NonTensorData(value) for value in column])
        for key, value in self.meta_info.items():
            entries[key] = NonTensorData(value)
        return TensorDict(entries, batch_size=[len(self)] if self.batch is None else self.batch.batch_size)

    def check_consistency(self) -> None:
        """Raise DataError unless all columns have the same number of rows and a form that every method can handle."""
        rows: dict[str, int] = {}
        names = self._all_keys("batch")
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

    # --- what is in it ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Rows; 0 if there are no columns."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((column.shape[0] for column in self.non_tensor_batch.values()), 0)

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self._item(row) for row in range(len(self)))

    def __repr__(self) -> str:
        return f"DataProto of {len(self)} rows\n{self.get_data_info()}"

    def get_data_info(self) -> str:
        """One line per column and per key of meta_info: type, sizes, device."""
        lines = ["batch"]
        if self.batch is not None:
            lines += [f"  {key}: {columns.describe(value)} {value.device}" for key, value in self.batch.items()]
        lines.append("non_tensor_batch")
        lines += [f"  {key}: {columns.describe(value)}" for key, value in self.non_tensor_batch.items()]
        lines.append("meta_info")
        lines += [f"  {key}: {columns.describe(value)}" for key, value in self.meta_info.items()]
        return "\n".join(lines)

    def _column_names(self) -> set[str]:
        return {*self._all_keys("batch"), *self.non_tensor_batch}

    # --- rows ---------------------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, item: int) -> DataProtoItem: ...

    @overload
    def __getitem__(self, item: RowSelection) -> "DataProto": ...

    def __getitem__(self, item: int | RowSelection) -> "DataProto | DataProtoItem":
        """One row as DataProtoItem for an int; else a DataProto of the rows that a slice, list, array, tensor or
        boolean mask selects. Raises DataError for a row that does not exist or another kind of index."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if columns.is_row_number(item):
            return self._item(int(columns.row_numbers([int(item)], len(self))))
        return self.select_idxs(item)

    def select_idxs(self, idxs: RowNumbers) -> "DataProto":
        """The rows with these numbers (negative ones count from the end), in this order, repeated where repeated."""
        return self._take(columns.row_numbers(idxs, len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> "DataProto":
        """The rows `start:end:step`; with step 1 as views."""
        try:
            first, stop, stride = slice(start, end, step).indices(len(self))
        except (TypeError, ValueError) as error:
            raise DataError(f"rows cannot be sliced by {start}:{end}:{step}: {error}") from error
        if stride == 1:
            return self._take(slice(first, max(first, stop)))
        return self._take(columns.row_numbers(range(first, stop, stride), len(self)))

    def _item(self, row: int) -> DataProtoItem:
        batch = None if self.batch is None else columns.batch_row(self.batch, row)
        arrays = {key: column[row] for key, column in self.non_tensor_batch.items()}
        return DataProtoItem(batch, arrays, dict(self.meta_info))

    def _take(self, rows: Any) -> "DataProto":
        """New DataProto of rows given by a slice or by non-negative row numbers."""
        # copy() is shallow: a full slice of a TensorDict is the TensorDict itself.
        batch = None if self.batch is None else self.batch[rows].copy()
        return DataProto(batch, _take_arrays(self.non_tensor_batch, rows), dict(self.meta_info))

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
        """Exactly `chunks` parts in row order, sizes differing by at most one, larger first; maybe empty ones."""
        columns.check_positive("chunks", chunks)
        size, larger = divmod(len(self), chunks)
        starts = [part * size + min(part, larger) for part in range(chunks + 1)]
        return [self.slice(start, stop) for start, stop in pairwise(starts)]

    def split(self, split_size: int) -> list["DataProto"]:
        """Parts of `split_size` rows in row order, the last one maybe smaller; one empty part of an empty batch."""
        columns.check_positive("split_size", split_size)
        return [self.slice(start, start + split_size) for start in range(0, max(len(self), 1), split_size)]

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """The rows of all parts below one another; meta_info holds the keys of all.

        Raises DataError if nothing is given, if a column is missing somewhere or differs in dtype, device or row shape,
        or if a key of meta_info has two values.
        """
        if not data:
            raise DataError("concat needs at least one DataProto")
        return DataProto(
            columns.join_tensors([part.batch for part in data]),
            columns.join_arrays([part.non_tensor_batch for part in data]),
            columns.merge_meta(part.meta_info for part in data),
        )

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator["DataProto"]:
        """Mini-batches of `mini_batch_size` rows, `epochs` times over; the last of an epoch has the rows left.

        dataloader_kwargs: for torch's DataLoader, such as `{"shuffle": True}`, which draws a new order each epoch
            from `seed` (without one, from torch's global generator).
        """
        columns.check_positive("mini_batch_size", mini_batch_size)
        columns.check_positive("epochs", epochs)
        options = dict(dataloader_kwargs or {})
        taken = sorted(options.keys() & {"dataset", "batch_size", "collate_fn", "generator"})
        if taken:
            raise DataError(f"dataloader_kwargs sets {taken[0]!r}, which make_iterator sets itself")
        if len(self) == 0:  # torch's RandomSampler refuses it
            return iter(())
        loader: DataLoader = DataLoader(
            range(len(self)),
            batch_size=mini_batch_size,
            collate_fn=self.select_idxs,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
            **options,
        )
        return (part for _ in range(epochs) for part in loader)

    # --- columns ------------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """These columns and keys; None stands for all. Raises DataError for one that is missing.

        deepcopy: copy tensors, objects and meta_info too, so that nothing is shared.
        """
        batch, arrays, meta = self._chosen(
            self._all_keys("batch") if batch_keys is None else batch_keys,
            self._all_keys("non_tensor_batch") if non_tensor_batch_keys is None else non_tensor_batch_keys,
            self._all_keys("meta_info") if meta_info_keys is None else meta_info_keys,
        )
        if deepcopy:
            batch = None if batch is None else batch.clone()
            arrays, meta = copy.deepcopy(arrays), copy.deepcopy(meta)
        return DataProto(batch, arrays, meta)

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> "DataProto":
        """Remove these columns and keys from here and return them as a DataProto; None stands for none.

        Raises DataError, and removes nothing, if one is missing.
        """
        popped = DataProto(*self._chosen(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ()))
        if self.batch is not None and popped.batch is not None:
            self.batch = self.batch.exclude(*popped.batch.keys())
        self.non_tensor_batch = _without(self.non_tensor_batch, popped.non_tensor_batch)
        self.meta_info = _without(self.meta_info, popped.meta_info)
        return popped

    def _all_keys(self, place: str) -> list[str]:
        holder = getattr(self, place)
        return [] if holder is None else list(holder.keys())

    def _chosen(
        self, batch_keys: Iterable[str], non_tensor_batch_keys: Iterable[str], meta_info_keys: Iterable[str]
    ) -> tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any]]:
        names = {}
        for place, keys in zip(
            ("batch", "non_tensor_batch", "meta_info"),
            (batch_keys, non_tensor_batch_keys, meta_info_keys),
            strict=True,
        ):
            names[place] = _key_list(keys)
            _check_known(place, names[place], self._all_keys(place))
        return (
            None if self.batch is None else self.batch.select(*names["batch"]),
            {key: self.non_tensor_batch[key] for key in names["non_tensor_batch"]},
            {key: self.meta_info[key] for key in names["meta_info"]},
        )

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> "DataProto":
        """Give columns new names, here; returns self. Raises DataError if an old name is missing or a new one taken."""
        old, new = _key_list(old_keys), _key_list(new_keys)
        if len(old) != len(new):
            raise DataError(f"rename was given {len(old)} different old names and {len(new)} different new ones")
        names = self._column_names()
        _check_known("the batch", old, sorted(names))
        clash = sorted(set(new) & (names - set(old)))
        if clash:
            raise DataError(f"rename cannot use {clash[0]!r}, the name of another column")
        to_new = dict(zip(old, new, strict=True))
        if self.batch is not None:
            renamed = {to_new.get(key, key): column for key, column in self.batch.items()}
            self.batch = TensorDict(renamed, batch_size=self.batch.batch_size, device=self.batch.device)
        self.non_tensor_batch = {to_new.get(key, key): column for key, column in self.non_tensor_batch.items()}
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Add the columns and meta_info of `other`, row by row, here; returns self.

        Raises DataError, and adds nothing, if row counts differ or a name that both have holds different values
        (NaN equals itself).
        """
        rows = {"self": len(self), "other": len(other)}
        columns.check_same_rows(
            {name: rows[name] for name, part in (("self", self), ("other", other)) if part._has_rows()}
        )
        batch = columns.union_batches(self.batch, other.batch)
        arrays = columns.union_columns("non_tensor_batch", self.non_tensor_batch, other.non_tensor_batch)
        joined = DataProto(batch, arrays, columns.merge_meta([self.meta_info, other.meta_info]))
        self.batch, self.non_tensor_batch, self.meta_info = joined.batch, joined.non_tensor_batch, joined.meta_info
        return self

    def _has_rows(self) -> bool:
        """False for a batch without any columns, which has no row count of its own."""
        return self.batch is not None or bool(self.non_tensor_batch)

    # --- devices and files --------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> "DataProto":
        """Move the tensor columns to a device, here; returns self."""
        if self.batch is not None:
            self.batch = columns.with_shared_offsets(self.batch.to(device))
        return self

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write all to one file, without pickle: tensors as safetensors, the rest as JSON inside it.

        Raises DataError naming the key that cannot be stored: tensors of unusual dtypes, and Python objects other than
        None, bool, int, float, str, lists and dicts with string keys of these (NumPy scalars are stored as the equal
        Python numbers). An existing file is replaced at once, never half-written.
        """
        dataproto_io.save(filepath, self.batch, self.non_tensor_batch, self.meta_info)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str]) -> "DataProto":
        """Read what `save_to_disk` wrote, onto the CPU. Executes nothing from the file.

        Raises DataError if the file is missing, damaged, or of another format or version.
        """
        return DataProto(*dataproto_io.load(filepath))


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """`data` with rows repeated from its start until `size_divisor` divides their number; and how many were added."""
    columns.check_positive("size_divisor", size_divisor)
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data.slice(), 0
    return data.select_idxs(torch.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """`data` without its last `pad_size` rows: the reverse of `pad_dataproto_to_divisor`."""
    if not 0 <= pad_size <= len(data):
        raise DataError(f"pad_size={pad_size} rows cannot be removed from a batch of {len(data)}")
    return data.slice(0, len(data) - pad_size)


def _take_arrays(arrays: Mapping[str, np.ndarray], rows: Any) -> dict[str, np.ndarray]:
    rows = rows if isinstance(rows, slice) else rows.numpy()
    return {key: column[rows] for key, column in arrays.items()}


def _key_list(keys: Iterable[str]) -> list[str]:
    """Names without repetition; one name may come without a list around it."""
    return [keys] if isinstance(keys, str) else list(dict.fromkeys(keys))


def _check_known(place: str, keys: Iterable[str], known: Sequence[str]) -> None:
    for key in keys:
        if key not in known:
            raise DataError(f"{place} has no {key!r}, only {list(known)}")


def _without(mapping: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    dropped = set(keys)
    return {key: value for key, value in mapping.items() if key not in dropped}
