"""Arrays in a compressed file: written whole, and read without pickle."""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from controller.observability.run_folder import writing
from workers.batch.dataproto import DataProto
from workers.errors import DataError, clause


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part_path = path.with_suffix(".part.npz")
        np.savez_compressed(part_path, **arrays)  # type: ignore[arg-type]
        part_path.replace(path)


@contextmanager
def open_arrays(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """Open a file for the block. Errors of both become a DataError."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays
    except (OSError, ValueError, KeyError, TypeError, BadZipFile, zlib.error) as error:
        reason = (
            "it is not a file of samples" if "allow_pickle" in str(error) else clause(error)
        )
        raise DataError(
            f"{path} cannot be read: {reason}. Record the samples again."
        ) from None


def as_bytes(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def from_bytes(array: np.ndarray) -> Any:
    return json.loads(array.tobytes())


def pack_rows(name: str, block: DataProto) -> dict[str, np.ndarray]:
    return {f"{name}.offsets": block.offsets} | {
        f"{name}.{column}": values for column, values in block.tokens.items()
    }


def unpack_rows(name: str, arrays: Mapping[str, np.ndarray]) -> DataProto:
    columns = select_arrays(name, arrays)
    return DataProto(np.diff(columns.pop("offsets")), columns)


def select_arrays(name: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        key.removeprefix(f"{name}."): arrays[key]
        for key in arrays
        if key.startswith(f"{name}.")
    }
