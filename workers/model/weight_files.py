"""The safetensors files of a model's folder, one or those of an index, and what their headers say."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from workers.errors import ConfigError
from workers.json_file import read_json

Shapes = dict[str, tuple[int, ...]]
"""Shapes of weights, by name."""
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"


def weight_shapes(folder: Path) -> Shapes:
    """Read the shape of every weight, by name, from the headers of the model's files.

    Raises ConfigError for a file that is missing, torn, or does not hold what the index says.
    """
    key = f"model.path={folder}"
    shapes: Shapes = {}
    for file in list_weight_files(folder, key):
        shapes |= _shapes_of_file(file, key)
    if (folder / ONE_FILE).is_file():
        return shapes
    files = _read_index(folder, key)
    if missing := sorted(set(files) - set(shapes)):
        file = folder / files[missing[0]]
        raise ConfigError(
            f"{key}: {file} lacks {missing[0]}, which {INDEX} names. Fetch the model again."
        )
    return shapes


def list_weight_files(folder: Path, key: str) -> list[Path]:
    """Return the files with a model's weights. Raises ConfigError, naming `key`, for one that is missing."""
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    files = sorted(set(_read_index(folder, key).values()))
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():
            raise ConfigError(
                f"{key}: {folder} lacks {file[:80]}, which {INDEX} names. Fetch the model again."
            )
    return [folder / file for file in files]


def _read_index(folder: Path, key: str) -> dict[str, str]:
    """Return the file of each weight."""
    if not (folder / INDEX).is_file():
        raise ConfigError(
            f"{key}: {folder} has neither {ONE_FILE} nor {INDEX}. Save the model in that form."
        )
    files = read_json(folder / INDEX, key).get("weight_map")
    if not isinstance(files, Mapping):
        raise ConfigError(
            f"{key}: {folder / INDEX} has no weight_map. Fetch the model again."
        )
    return {name: str(file) for name, file in files.items()}


def _shapes_of_file(file: Path, key: str) -> Shapes:
    try:
        with safe_open(file, framework="np") as weights:
            names = weights.keys()  # a file of safetensors is not a mapping
            return {name: tuple(weights.get_slice(name).get_shape()) for name in names}
    except SafetensorError as error:
        with file.open("rb") as start:
            is_pointer = start.read(len(LFS_POINTER)) == LFS_POINTER
        reason = (
            "it is a pointer of Git LFS. Run `git lfs pull`"
            if is_pointer
            else f"{error}. Fetch it again"
        )
        raise ConfigError(
            f"{key}: {file} is not a whole safetensors file: {reason}."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{key}: {file} cannot be read: {error.strerror or error}."
        ) from None
