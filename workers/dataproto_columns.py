"""The columns of a DataProto: checks, selection of rows, comparison and concatenation.

A tensor column is a plain tensor [B, ...] or a jagged one [B, j, ...]: `torch.nested`, layout `torch.jagged`, ragged
in dimension 1, `values` [T, ...] and `offsets` [B + 1]. A non-tensor column is a NumPy array [B, ...].

B rows, T tokens of all rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from workers.errors import DataError

RowNumbers = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor
RowSelection = slice | RowNumbers


def is_jagged(column: torch.Tensor) -> bool:
    return column.is_nested and column.layout is torch.jagged


def describe(column: Any) -> str:
    """`int64[4, 7]`, `int64[4, jagged] with 31 tokens` or `object[4]`: a column as messages name it."""
    if not isinstance(column, (torch.Tensor, np.ndarray)):
        return type(column).__name__
    dtype = str(column.dtype).removeprefix("torch.")
    if isinstance(column, np.ndarray) or not column.is_nested:
        return f"{dtype}[{', '.join(map(str, column.shape))}]"
    sizes = ["jagged" if isinstance(size, torch.SymInt) else str(size) for size in column.shape]
    return f"{dtype}[{', '.join(sizes)}] with {column.values().shape[0]} tokens"


# --- checks -----------------------------------------------------------------------------------------------------------


def make_batch(tensors: Mapping[str, torch.Tensor]) -> TensorDict:
    """A TensorDict of these columns. Raises DataError unless they are sound and have one row count."""
    for key, column in tensors.items():
        _check_tensor_column(key, column)
    tight = {key: _without_gaps(column) for key, column in tensors.items()}
    rows = {f"batch[{key!r}]": column.shape[0] for key, column in tight.items()}
    check_same_rows(rows)
    return TensorDict(share_offsets(tight), batch_size=[next(iter(rows.values()))])


def _without_gaps(column: torch.Tensor) -> torch.Tensor:
    """`torch.nested.narrow` gives rows of a table with unused cells between them."""
    return column.contiguous() if is_jagged(column) and column.lengths() is not None else column


def check_batch(batch: Any) -> None:
    """Raise DataError unless `batch` is a TensorDict of rows with sound columns."""
    if not isinstance(batch, TensorDict):
        raise DataError(f"batch is a {type(batch).__name__}, not a TensorDict; from_dict makes one")
    if batch.batch_dims != 1:
        raise DataError(f"batch is a TensorDict of batch size {list(batch.batch_size)}, which must be [rows]")
    for key, column in batch.items():
        _check_tensor_column(key, column)


def _check_tensor_column(key: Any, column: Any) -> None:
    """Raise DataError unless `column` is a plain tensor with rows, or ragged in dimension 1 with sound offsets."""
    if not isinstance(key, str):
        raise DataError(f"column name {key!r} of batch is a {type(key).__name__}; names are strings")
    if not isinstance(column, torch.Tensor):
        raise DataError(
            f"batch[{key!r}] is a {type(column).__name__}, not a tensor; other data belongs in non_tensor_batch"
        )
    if column.is_nested:
        _check_jagged(key, column)
    elif column.layout is not torch.strided:
        raise DataError(f"batch[{key!r}] has layout {column.layout}; columns are strided or torch.jagged")
    elif column.dim() == 0:
        raise DataError(f"batch[{key!r}] is a scalar without rows; put it into meta_info")


def _check_jagged(key: str, column: torch.Tensor) -> None:
    if not is_jagged(column):
        raise DataError(f"batch[{key!r}] is a nested tensor of strided layout; make it with layout=torch.jagged")
    if not isinstance(column.shape[1], torch.SymInt):
        raise DataError(f"batch[{key!r}] is ragged in another dimension than 1; transpose it back")
    offsets, lengths, tokens = column.offsets(), column.lengths(), column.values().shape[0]
    if offsets.dtype not in (torch.int32, torch.int64):
        raise DataError(f"batch[{key!r}] has offsets of {offsets.dtype}; they are whole numbers")
    stops = offsets[1:] if lengths is None else offsets[:-1] + lengths
    # Torch takes any offsets; wrong ones would read other rows or foreign memory later.
    inside = bool(((offsets[:-1] >= 0) & (stops >= offsets[:-1]) & (stops <= tokens)).all())
    if not inside or (lengths is None and (offsets[0] != 0 or offsets[-1] != tokens)):
        shown = ", ".join(str(offset) for offset in offsets[:8].tolist())
        dots = ", ..." if len(offsets) > 8 else ""
        raise DataError(f"batch[{key!r}] has offsets that do not cut its {tokens} tokens into rows: [{shown}{dots}]")


def check_array_column(key: Any, column: Any) -> None:
    """Raise DataError unless `column` is a NumPy array with rows."""
    if not isinstance(key, str):
        raise DataError(f"column name {key!r} of non_tensor_batch is a {type(key).__name__}; names are strings")
    if not isinstance(column, np.ndarray):
        raise DataError(f"non_tensor_batch[{key!r}] is a {type(column).__name__}, not a NumPy array")
    if column.ndim == 0:
        raise DataError(f"non_tensor_batch[{key!r}] is a scalar without rows; put it into meta_info")


def check_same_rows(rows: Mapping[str, int]) -> None:
    """Raise DataError naming two columns whose row counts differ."""
    names = list(rows)
    for name in names[1:]:
        if rows[name] != rows[names[0]]:
            raise DataError(f"{name} has {rows[name]} rows, but {names[0]} has {rows[names[0]]}")


def check_positive(name: str, value: Any) -> None:
    """Raise DataError unless `value` is an int above 0."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise DataError(f"{name}={value!r} is not a positive whole number")


def object_column(key: str, values: Any) -> np.ndarray:
    """One object per row, [B]; rows that are lists of one length stay lists. Arrays are taken as they are."""
    if isinstance(values, np.ndarray):
        return values
    if not isinstance(values, (list, tuple)):
        raise DataError(
            f"non_tensor_batch[{key!r}] is a {type(values).__name__}; give a NumPy array or a list with one item a row"
        )
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


# --- rows -------------------------------------------------------------------------------------------------------------


def row_numbers(index: Any, rows: int) -> torch.Tensor:
    """Row numbers (int64, within 0..rows-1, on the CPU) that a list, array, tensor or boolean mask selects.

    Raises DataError for what is not one-dimensional, neither integer nor boolean, out of range, or a mask of another
    length.
    """
    numbers = _index_tensor(index)
    if numbers.dim() != 1:
        raise DataError(f"rows are selected by one-dimensional indices, not by shape {list(numbers.shape)}")
    if numbers.dtype is torch.bool:
        if len(numbers) != rows:
            raise DataError(f"a boolean mask of {len(numbers)} entries cannot select among {rows} rows")
        return numbers.nonzero().flatten()
    if numbers.is_floating_point() or numbers.is_complex():
        raise DataError(f"rows are selected by integers or booleans, not by {describe(numbers).partition('[')[0]}")
    numbers = numbers.to(torch.int64)
    outside = numbers[(numbers < -rows) | (numbers >= rows)]
    if len(outside):
        raise DataError(f"row {outside[0].item()} does not exist in a batch of {rows} rows")
    return torch.where(numbers < 0, numbers + rows, numbers)


def _index_tensor(index: Any) -> torch.Tensor:
    if isinstance(index, (list, range)) and len(index) == 0:
        return torch.empty(0, dtype=torch.int64)
    if not isinstance(index, (list, range, np.ndarray, torch.Tensor)):
        raise DataError(f"rows are selected by slice, list, array, tensor or mask, not by {type(index).__name__}")
    try:
        return torch.as_tensor(index).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"rows cannot be selected by {describe(index)}: {error}") from error


# --- offsets and storage ----------------------------------------------------------------------------------------------


def share_offsets(columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same columns, with one offsets tensor wherever row lengths agree; values are not copied.

    Torch multiplies two jagged tensors only if their offsets are one object, not merely equal.
    """
    distinct: list[torch.Tensor] = []
    return {
        key: _with_known_offsets(column, distinct) if is_jagged(column) else column for key, column in columns.items()
    }


def _with_known_offsets(column: torch.Tensor, distinct: list[torch.Tensor]) -> torch.Tensor:
    """The column over the offsets of one of `distinct`, to which it is added if none has the same row lengths."""
    if any(column.offsets() is other.offsets() for other in distinct):
        return column
    for other in distinct:
        if _same_offsets(column, other):
            return torch.nested.nested_tensor_from_jagged(column.values(), other.offsets())
    distinct.append(column)
    return column


def _same_offsets(left: torch.Tensor, right: torch.Tensor) -> bool:
    mine, theirs = left.offsets(), right.offsets()
    if mine.device != theirs.device or mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return False
    # Torch gives copies on another device the same symbolic size; meta tensors hold nothing else to compare.
    return bool(left.shape[1] == right.shape[1] or (not mine.is_meta and torch.equal(mine, theirs)))


def with_shared_offsets(batch: TensorDict) -> TensorDict:
    return TensorDict(share_offsets(dict(batch.items())), batch_size=batch.batch_size, device=batch.device)


def without_views(batch: TensorDict) -> TensorDict:
    """The same columns, copied where they are a part of a larger storage."""
    owned = {key: column.clone() if _is_view(column) else column for key, column in batch.items()}
    return TensorDict(owned, batch_size=batch.batch_size, device=batch.device)


def _is_view(column: torch.Tensor) -> bool:
    stored = column.values() if is_jagged(column) else column
    return bool(stored.untyped_storage().nbytes() > stored.numel() * stored.element_size())


# --- equality ---------------------------------------------------------------------------------------------------------


def same(left: Any, right: Any) -> bool:
    """Deep equality of tensors, arrays, containers and scalars, in which NaN equals itself."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _same_tensor(left, right)
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return _same_array(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return left is right or _is_true(left == right) or (_is_true(left != left) and _is_true(right != right))


def _is_true(answer: Any) -> bool:
    """Comparisons of foreign objects, and of a tensor with a number, may return anything."""
    return isinstance(answer, (bool, np.bool_)) and bool(answer)


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or is_jagged(left) != is_jagged(right):
        return False
    if is_jagged(left):
        return same(left.offsets().long(), right.offsets().long()) and same(left.values(), right.values())
    if left.shape != right.shape:
        return False
    return bool(torch.isclose(left, right.to(left.device), rtol=0, atol=0, equal_nan=True).all())


def _same_array(left: np.ndarray, right: np.ndarray) -> bool:
    if left.shape != right.shape:
        return False
    kinds = {left.dtype.kind, right.dtype.kind}
    if kinds & set("OV"):
        return all(same(a, b) for a, b in zip(left.flat, right.flat, strict=True))
    return bool(np.array_equal(left, right, equal_nan=kinds <= set("fc")))


# --- concatenation and union ------------------------------------------------------------------------------------------


def concat_tensors(parts: Sequence[TensorDict | None]) -> TensorDict | None:
    """The rows of all parts, one after another. Raises DataError if columns, dtypes or row shapes differ."""
    _check_joinable("batch", [{} if part is None else dict(part.items()) for part in parts])
    present = [part for part in parts if part is not None]
    if not present:
        return None
    return with_shared_offsets(torch.cat([part.select(*present[0].keys()) for part in present]))


def concat_arrays(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The rows of all parts, one after another. Raises DataError if columns, dtypes or row shapes differ."""
    _check_joinable("non_tensor_batch", parts)
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _check_joinable(place: str, parts: Sequence[Mapping[str, Any]]) -> None:
    first = parts[0]
    for number, part in enumerate(parts):
        odd = sorted(first.keys() ^ part.keys())
        if odd:
            lacking = number if odd[0] in first else 0
            raise DataError(f"{place}[{odd[0]!r}] is missing in part {lacking} of the parts to be joined")
        for key, column in part.items():
            if _row_form(first[key]) != _row_form(column):
                raise DataError(
                    f"{place}[{key!r}] is {describe(first[key])} in part 0 and {describe(column)} in part {number}; "
                    "joined columns need one dtype, device and row shape"
                )


def _row_form(column: Any) -> tuple[Any, ...]:
    """Properties that must agree between joined columns. Strings of any width join."""
    if isinstance(column, np.ndarray):
        return column.dtype.kind if column.dtype.kind in "US" else column.dtype, column.shape[1:]
    jagged = is_jagged(column)
    return column.dtype, column.device, jagged, column.shape[2:] if jagged else column.shape[1:]


def union_batches(mine: TensorDict | None, theirs: TensorDict | None) -> TensorDict | None:
    """Columns of both side by side. Raises DataError if columns of one name differ."""
    if mine is None or theirs is None:
        return theirs if mine is None else mine
    united = union_columns("batch", dict(mine.items()), dict(theirs.items()))
    return TensorDict(share_offsets(united), batch_size=mine.batch_size, device=mine.device)


def union_columns(place: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Both dicts as one. Raises DataError naming a key whose values differ (NaN equals itself)."""
    for key in mine:
        if key in theirs and not same(mine[key], theirs[key]):
            raise DataError(
                f"{place}[{key!r}] differs in the two batches, {describe(mine[key])} here and "
                f"{describe(theirs[key])} there; rename one of them"
            )
    return {**mine, **theirs, **mine}


def merge_meta(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One dict with all keys. Raises DataError naming a key that has two values."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if not same(merged.setdefault(key, value), value):
                raise DataError(
                    f"meta_info[{key!r}] is {_short(merged[key])} in one part and {_short(value)} in another"
                )
    return merged


def _short(value: Any, width: int = 60) -> str:
    text = describe(value) if isinstance(value, (torch.Tensor, np.ndarray)) else repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."
