"""A batch on disk: one safetensors file, in which nothing can execute.

    header      {"format": "ballast-dataproto", "version": "1"}
    document    uint8 [bytes]: JSON with batch size, list of columns, object arrays and meta_info
    tensor/K    column K of the batch: the tensor, or the values of a jagged column
    offsets/N   offsets of jagged columns; the document says which columns share them
    array/K     numeric NumPy array K of non_tensor_batch

JSON goes into a tensor, not into the header, because safetensors limits its header to 100 MB. Floats that are not
finite are written as NaN and Infinity, as Python's json module does by default.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tensordict import TensorDict

from workers.dataproto_columns import is_jagged, object_column, share_offsets
from workers.errors import DataError

FORMAT = "ballast-dataproto"
VERSION = "1"

Parts = tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any]]

STORABLE_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.float8_e4m3fn, torch.float8_e5m2,
        torch.complex64,
    }
)  # fmt: skip


# --- saving -----------------------------------------------------------------------------------------------------------


def save(
    path: str | os.PathLike[str],
    batch: TensorDict | None,
    non_tensor_batch: Mapping[str, np.ndarray],
    meta_info: Mapping[str, Any],
) -> None:
    """Write all to `path`, replacing it in one step. Raises DataError naming a key that cannot be stored."""
    tensors: dict[str, torch.Tensor] = {}
    document = {
        "batch_size": None if batch is None else list(batch.batch_size),
        "tensors": [] if batch is None else _encode_tensors(batch, tensors),
        "arrays": [_encode_array(key, column, tensors) for key, column in non_tensor_batch.items()],
        "meta_info": {
            key: _encode_object(value, f"meta_info[{key!r}]") for key, value in _string_keys(meta_info, "meta_info")
        },
    }
    text = json.dumps(document).encode("ascii")
    tensors["document"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    _write(Path(path), _without_shared_storage(tensors))


def _encode_tensors(batch: TensorDict, tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    numbers: dict[int, int] = {}  # by identity: columns that share offsets in memory share them on disk
    tight = {key: _without_holes(column) for key, column in batch.items()}
    return [_encode_tensor(key, column, numbers, tensors) for key, column in share_offsets(tight).items()]


def _without_holes(column: torch.Tensor) -> torch.Tensor:
    return column.contiguous() if is_jagged(column) and column.lengths() is not None else column


def _encode_tensor(
    key: str, column: torch.Tensor, numbers: dict[int, int], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    if column.dtype not in STORABLE_DTYPES:
        raise DataError(
            f"batch[{key!r}] has dtype {column.dtype}, which cannot be stored; convert or pop it before saving"
        )
    if not is_jagged(column):
        tensors[f"tensor/{key}"] = _plain(column)
        return {"key": key}
    number = numbers.setdefault(id(column.offsets()), len(numbers))
    tensors[f"tensor/{key}"] = _plain(column.values())
    tensors[f"offsets/{number}"] = _plain(column.offsets())
    return {"key": key, "offsets": number}


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _without_shared_storage(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """safetensors refuses two tensors of one storage: the later ones are copied."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return separate


def _encode_array(key: str, column: np.ndarray, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    name = f"non_tensor_batch[{key!r}]"
    if column.dtype.kind == "O":
        items = [_encode_object(value, f"{name}, item {row},") for row, value in enumerate(column.flat)]
        return {"key": key, "kind": "object", "shape": column.shape, "items": items}
    if column.dtype.kind == "U":
        return {"key": key, "kind": "string", "shape": column.shape, "items": column.ravel().tolist()}
    try:
        tensor = torch.from_numpy(np.array(column, order="C"))
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} has dtype {column.dtype}, which cannot be stored: {error}") from error
    if tensor.dtype not in STORABLE_DTYPES:
        raise DataError(f"{name} has dtype {column.dtype}, which cannot be stored; convert or pop it before saving")
    tensors[f"array/{key}"] = tensor
    return {"key": key, "kind": "numeric"}


def _encode_object(value: Any, name: str) -> Any:
    """JSON form of what loads again as something equal; anything else is refused under `name`."""
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_encode_object(item, name) for item in value]
    if isinstance(value, dict):
        return {key: _encode_object(item, name) for key, item in _string_keys(value, name)}
    raise DataError(
        f"{name} holds a {type(value).__name__}, which cannot be stored; "
        "None, bool, int, float, str, list and dict can (or pop the key before saving)"
    )


def _string_keys(mapping: Mapping[Any, Any], name: str) -> list[tuple[str, Any]]:
    for key in mapping:
        if not isinstance(key, str):
            raise DataError(f"{name} holds the key {key!r}, which cannot be stored; only strings can be keys")
    return list(mapping.items())


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(dict(tensors), partial, metadata={"format": FORMAT, "version": VERSION})
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"the batch cannot be written to {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


# --- loading ----------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> Parts:
    """The parts that `save` wrote. Raises DataError if the file is missing, damaged or of another format or version."""
    if not Path(path).is_file():
        raise DataError(f"there is no saved batch at {path}")
    tensors = _read(path)
    try:
        document = json.loads(bytes(tensors["document"].numpy()))
        return _decode_tensors(document, tensors), _decode_arrays(document, tensors), _decode_meta(document)
    # A file from a stranger may hold anything in any place.
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise DataError(f"the saved batch {path} is damaged: {type(error).__name__}: {error}") from error


def _read(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            _check_header(path, header)
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a batch saved by save_to_disk: {error}") from error


def _check_header(path: str | os.PathLike[str], header: Mapping[str, str]) -> None:
    if header.get("format") != FORMAT:
        raise DataError(f"{path} has format {header.get('format')!r}, not {FORMAT!r}; save_to_disk writes that")
    if header.get("version") != VERSION:
        raise DataError(f"{path} has version {header.get('version')!r} of the format; this program reads {VERSION!r}")


def _decode_tensors(document: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> TensorDict | None:
    if document["batch_size"] is None:
        return None
    columns = {column["key"]: _decode_tensor(column, tensors) for column in document["tensors"]}
    return TensorDict(columns, batch_size=document["batch_size"])


def _decode_tensor(column: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    values = tensors[f"tensor/{column['key']}"]
    if "offsets" not in column:
        return values
    offsets = tensors[f"offsets/{column['offsets']}"]
    if offsets.dim() != 1:
        raise ValueError(f"the offsets of {column['key']!r} have {offsets.dim()} dimensions")
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _decode_arrays(document: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {column["key"]: _decode_array(column, tensors) for column in document["arrays"]}


def _decode_array(column: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    if column["kind"] == "numeric":
        array: np.ndarray = tensors[f"array/{column['key']}"].numpy()
        return array
    if column["kind"] == "string":
        return np.array(column["items"], dtype=str).reshape(column["shape"])
    return object_column(column["key"], column["items"]).reshape(column["shape"])


def _decode_meta(document: dict[str, Any]) -> dict[str, Any]:
    return dict(document["meta_info"])
