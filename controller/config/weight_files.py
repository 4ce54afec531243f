"""Names and shapes of a model's weights by the headers of its files: no tensor is read, torch is not imported.

model.safetensors, or model.safetensors.index.json and its files --weight_shapes--> {"lm_head.weight": (32, 8), ...}
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from controller.config.model_files import read_json
from workers.errors import ConfigError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"
Shapes = dict[str, tuple[int, ...]]


def weight_shapes(folder: Path, key: str) -> Shapes:
    """Shape of every weight by its name, of the model in `folder`, which setting `key` names.

    Raises ConfigError that names the file which is missing, torn, or does not hold what the index says.
    """
    if (folder / ONE_FILE).is_file():
        return _shapes_of_file(folder / ONE_FILE, key)
    if not (folder / INDEX).is_file():
        raise ConfigError(f"{key}: {folder} has neither {ONE_FILE} nor {INDEX}; save the model in that form.")
    return _shapes_of_index(folder, key)


def _shapes_of_index(folder: Path, key: str) -> Shapes:
    files = read_json(folder / INDEX, key).get("weight_map")
    if not isinstance(files, Mapping):
        raise ConfigError(f"{key}: {folder / INDEX} has no weight_map.")
    foreign = [repr(file)[:80] for file in files.values() if not isinstance(file, str) or Path(file).name != file]
    if foreign:
        raise ConfigError(f"{key}: {folder / INDEX} names {foreign[0]}, which is not a file of its folder.")
    shapes: Shapes = {}
    for file in sorted(set(files.values())):
        if not (folder / file).is_file():
            raise ConfigError(f"{key}: {folder} lacks {file}, which {INDEX} names; fetch the model again.")
        shapes |= _shapes_of_file(folder / file, key)
    missing = sorted(set(files) - set(shapes))
    if missing:
        raise ConfigError(
            f"{key}: {folder / files[missing[0]]} does not hold {missing[0]}, which {INDEX} says; fetch the model "
            "again."
        )
    return shapes


def _shapes_of_file(file: Path, key: str) -> Shapes:
    """Raises ConfigError if the header is not valid, or the file's length is not what the header says."""
    try:
        with safe_open(file, framework="np") as weights:
            return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ConfigError(f"{key}: {file} is not a whole safetensors file: {_reason(file, error)}.") from None
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read: {error.strerror or error}.") from None


def _reason(file: Path, error: SafetensorError) -> str:
    with file.open("rb") as start:
        if start.read(len(LFS_POINTER)) == LFS_POINTER:
            return "it is a pointer of Git LFS, fetch its contents by `git lfs pull`"
    reason = str(error).removeprefix("Error while deserializing header: ")
    return f"{reason} ({file.stat().st_size:,} bytes); fetch it again"
