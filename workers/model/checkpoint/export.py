"""Write a model as a Hugging Face folder, by several ranks at once. The folder appears when it is complete.

    conversions --5 GB a file--> files --round of one file a rank--> gather to its writer --> all ranks write
    rank 0: all files there? --> index, the source's other files byte for byte --> rename

A rank holds one file at a time in host memory. All ranks must see the folder.
"""

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import cached_file

from workers.errors import OutputError, clause
from workers.model.checkpoint.checkpoint_weights import CheckpointWeights, Conversion
from workers.model.quantized import FIELD
from workers.model.sharding.raise_on_all_ranks import raise_on_all_ranks
from workers.model.weight_files import INDEX


def write_weights(weights: Mapping[str, Tensor], file: Path) -> None:
    """Write contiguous tensors. Raises as `safetensors.torch.save_file` does."""
    file.touch()  # for its mode: the library ignores the umask and makes files that only their owner reads
    mode = file.stat().st_mode & 0o777
    save_file(dict(weights), file, metadata={"format": "pt"})
    file.chmod(mode)


FILE_BYTES = 5 * 10**9
WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)
"""Suffixes of weights and their indices, in any format, including pickles."""


def stored_dtype(path: str, default: torch.dtype) -> torch.dtype:
    """Return the dtype in a model's config.json, or `default`."""
    config = AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )
    dtype = getattr(config, "dtype", None) or getattr(
        config.get_text_config(), "dtype", None
    )
    return dtype if isinstance(dtype, torch.dtype) else default


def _plan_files(
    weights: CheckpointWeights, dtype: torch.dtype, file_bytes: int
) -> list[tuple[str, list[Conversion]]]:
    tied = set(weights.model.all_tied_weights_keys)
    conversions = {
        target: conversion
        for target, conversion in weights.plan.items()
        if not tied & set(conversion)
    }

    def size(conversion: Conversion) -> int:
        return sum(
            weight.nbytes for weight in weights.metadata([conversion], dtype).values()
        )

    split = split_state_dict_into_shards_factory(
        conversions,
        get_storage_size=size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=file_bytes,
    )
    files = []
    for file, names in split.filename_to_tensors.items():
        files.append((file, [conversions[name] for name in names]))
    return files


def write_model(
    weights: CheckpointWeights,
    source: str,
    path: Path,
    dtype: torch.dtype,
    file_bytes: int = FILE_BYTES,
    chat_template: str = "",
) -> None:
    """Write the model to `path`, weights in `dtype`. Collective: all ranks return when it is complete.

    source: the model's folder or name in the hub cache, whose other files are copied. chat_template: text
    that replaces the source's, unless empty. Raises OutputError, on every rank, if a rank cannot write.
    """
    files = _plan_files(weights, dtype, file_bytes)
    ranks = dist.get_world_size()
    with _replaced(path) as folder:
        for first in range(0, len(files), ranks):
            _write_round(weights, files[first : first + ranks], folder, dtype)
        _on_rank_zero(lambda: _write_metadata(weights, source, folder, files, dtype), path)
        if chat_template:
            _on_rank_zero(lambda: _replace_template(folder, chat_template), path)


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write(folder)` on rank 0 to replace `path`. Collective. Raises OutputError on every rank."""
    with _replaced(path) as folder:
        _on_rank_zero(lambda: write(folder), path)


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Replace `path` by the new folder that all ranks write to. Only one engine writes to `path`
    at a time.
    """
    unfinished, replaced = (
        path.with_name(f"{path.name}.{suffix}") for suffix in ("unfinished", "replaced")
    )

    def begin() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)

    def finish() -> None:
        shutil.rmtree(replaced, ignore_errors=True)
        if path.exists():
            path.rename(replaced)
        unfinished.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)

    _on_rank_zero(begin, path)
    try:
        yield unfinished
        _on_rank_zero(finish, path)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # exists if something failed


def _write_round(
    weights: CheckpointWeights,
    files: Sequence[tuple[str, list[Conversion]]],
    folder: Path,
    dtype: torch.dtype,
) -> None:
    mine: dict[str, Tensor] = {}
    for writer, (_, conversions) in enumerate(files):
        for name, weight in weights.convert(conversions, dtype, keeper=writer):
            mine[name] = weight.cpu().clone(memory_format=torch.contiguous_format)
    rank = dist.get_rank()
    _together(
        lambda: write_weights(mine, folder / files[rank][0]) if mine else None, folder
    )


def _write_metadata(
    weights: CheckpointWeights,
    source: str,
    folder: Path,
    files: Sequence[tuple[str, list[Conversion]]],
    dtype: torch.dtype,
) -> None:
    missing = [name for name, _ in files if not (folder / name).exists()]
    if missing:
        raise OSError(
            f"{missing[0]} of another rank is missing. Use a folder that all nodes share."
        )
    metadata = {name: weights.metadata(conversions, dtype) for name, conversions in files}
    if len(files) > 1:
        total = sum(
            weight.nbytes
            for file_metadata in metadata.values()
            for weight in file_metadata.values()
        )
        names = {
            name: file for file, file_metadata in metadata.items() for name in file_metadata
        }
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    _copy_files(
        Path(str(cached_file(source, "config.json", local_files_only=True))).parent, folder
    )
    _write_config(weights.model, folder, dtype)
    _describe_as_plain(folder / "config.json")


def _describe_as_plain(file: Path) -> None:
    """Remove the quantization of the source, whose weights were made plain."""
    description = json.loads(file.read_text(encoding="utf-8"))
    parts = [description, description.get("text_config") or {}]
    if any([part.pop(FIELD, None) for part in parts]):  # noqa: C419 (`any` would stop at the first)
        file.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def _copy_files(source: Path, folder: Path) -> None:
    """Copy the other files: a model saved by transformers would lose end tokens and sampling values."""
    for pattern in ("*", "additional_chat_templates/*"):
        for file in source.glob(pattern):
            if (
                file.is_file()
                and not file.name.startswith(".")
                and not file.name.endswith(WEIGHTS)
            ):
                copy = folder / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)


def _replace_template(folder: Path, text: str) -> None:
    # transformers prefers these templates for prompts with tools.
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")


def _write_config(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    # Another model: a new value head, or text only.
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    source_config = AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    keys = ("architectures", "model_type", "num_labels", "pad_token_id")
    if all(getattr(config, key, None) == getattr(source_config, key, None) for key in keys):
        return
    config.dtype = dtype
    # `save_pretrained` refuses generation settings.
    config.to_json_file(folder / "config.json")


def _on_rank_zero(action: Callable[[], None], path: Path) -> None:
    _together(lambda: action() if dist.get_rank() == 0 else None, path)


def _together(action: Callable[[], None], path: Path) -> None:
    with raise_on_all_ranks():
        try:
            action()
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise OutputError(
                f"{path} could not be written by rank {dist.get_rank()}: {clause(error)}."
            ) from error
