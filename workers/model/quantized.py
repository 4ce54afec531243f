"""Quantized checkpoints, read as the weights that they stand for, one weight at a time.

    files    q_proj.weight (fp8) + q_proj.weight_scale_inv      experts.down_proj_blocks + .._scales
    read     q_proj.weight                                      experts.down_proj

Nothing else of the loading knows of them. transformers' own conversion refuses blocks that do not divide a
weight, as in DeepSeek V3, and would be part of every export.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils import cached_file

from workers.errors import ConfigError, UnsupportedModelError
from workers.model.weight_files import Shapes, list_weight_files

FIELD = "quantization_config"
BLOCK = (128, 128)  # of fp8, where config.json names none
FP4_PER_BYTE, EXPONENT_BIAS = 2, 127
SCALES = ("_scale_inv", "_scale")
PACKED = ("_packed", "_scale", "_shape")
MXFP4 = ("_blocks", "_scales")
UNREAD = (
    "activation_scale",
    "input_scale",
    "output_scale",
    "k_scale",
    "v_scale",
    "q_scale",
)
"""Of quantized activations, which are not computed here."""
UNKNOWN = ("weight_zero_point", "weight_g_idx", "weight_global_scale")
COMPRESSED = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
"""Formats of compressed-tensors."""


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantized. block: rows and columns that share a scale, (1, 1) if the scales' shape
    tells. bits: of packed integers.
    """

    method: str
    block: tuple[int, int] = (1, 1)
    bits: int = 4

    def plain_shapes(self, shapes: Shapes, key: str) -> Shapes:
        """Return the shapes of the weights that files with tensors of `shapes` stand for."""
        parts = _stored_parts(shapes, key)
        return {name: self._shape(names, shapes) for name, names in parts.items()}

    def _shape(self, names: tuple[str, ...], shapes: Shapes) -> tuple[int, ...]:
        shape = shapes[names[0]]
        if names[0].endswith(MXFP4[0]):
            *experts, rows, groups, width = shape
            return (*experts, groups * width * FP4_PER_BYTE, rows)
        if names[0].endswith(PACKED[0]):
            return (*shape[:-1], shape[-1] * (32 // self.bits))
        return shape

    def plain(
        self, names: tuple[str, ...], read: Callable[[str], Tensor], key: str
    ) -> Tensor:
        """Return the weight, float32, that the tensors of `names` stand for."""
        stored, *scales = (read(name) for name in names)
        if names[0].endswith(MXFP4[0]):
            return convert_moe_packed_tensors(stored, scales[0], dtype=torch.float32)
        if names[0].endswith(PACKED[0]):
            from compressed_tensors.compressors.pack_quantized.helpers import (
                unpack_from_int32,
            )

            shape = torch.Size(scales[1].tolist())
            stored = unpack_from_int32(stored, self.bits, shape)
        return _scaled(stored, scales[0], self.block, f"{key}: {names[0]}")


@dataclass(frozen=True)
class QuantizedWeight:
    """Stand for a weight as safetensors' slices do: it is read, and made plain, when it is indexed."""

    quantization: Quantization
    names: tuple[str, ...]
    read: Callable[[str], Tensor]
    key: str

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        return self.quantization.plain(self.names, self.read, self.key)[index]


def quantization_of(
    config: PreTrainedConfig | Mapping[str, Any], key: str
) -> Quantization | None:
    """Return how a checkpoint is quantized, or None. Raises UnsupportedModelError, naming `key`, for what
    cannot be made plain.
    """
    fields = _fields(config)
    if not fields:
        return None
    method = str(fields.get("quant_method"))
    match method:
        case "mxfp4":
            return Quantization(method)
        case "fp8":
            rows, columns = fields.get("weight_block_size") or BLOCK
            return Quantization(method, (int(rows), int(columns)))
        case "compressed-tensors":
            return _compressed(fields, key)
    raise _not_read(method, key)


def _compressed(fields: Mapping[str, Any], key: str) -> Quantization:
    groups = list((fields.get("config_groups") or {}).values())
    formats = {str(group.get("format") or fields.get("format")) for group in groups}
    weights = [group.get("weights") or {} for group in groups]
    bits = {
        int(weight.get("num_bits") or 0)
        for weight in weights
        if weight.get("type") == "int"
    }
    sparse = (fields.get("sparsity_config") or {}).get("format") not in (None, "dense")
    if sparse or not formats <= set(COMPRESSED) or len(bits) > 1 or not bits <= {4, 8}:
        names = ", ".join(sorted(formats - set(COMPRESSED))) or "several forms"
        raise _not_read(f"compressed-tensors ({names})", key)
    if not all(weight.get("symmetric", True) for weight in weights):
        raise _not_read("compressed-tensors (asymmetric)", key)
    blocks = [
        weight["block_structure"] for weight in weights if weight.get("block_structure")
    ]
    rows, columns = blocks[0] if blocks else (1, 1)
    return Quantization(
        "compressed-tensors", (int(rows), int(columns)), next(iter(bits), 4)
    )


def _not_read(method: str, key: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{key}: weights quantized by {method} are not trained. Take them in bfloat16."
    )


def _fields(config: PreTrainedConfig | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the description of the quantization, of a model or of its text part."""
    if isinstance(config, Mapping):
        fields = config.get(FIELD) or (config.get("text_config") or {}).get(FIELD)
    else:
        fields = getattr(config, FIELD, None) or getattr(
            config.get_text_config(), FIELD, None
        )
    if fields is None or isinstance(fields, Mapping):
        return fields or {}
    description: Mapping[str, Any] = fields.to_dict()
    return description


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Remove the quantization from a model's description, in place."""
    for part in (config, config.get_text_config()):
        if getattr(part, FIELD, None) is not None:
            delattr(part, FIELD)
    return config


def read_plain(
    auto_class: Any,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    path: str,
    quantization: Quantization,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Read the quantized model at `path` by one of transformers' auto classes, with its loading report.

    config: without the quantization. Raises as transformers does.
    """
    weights = _plain_weights(path, quantization)
    with torch.device("meta"):
        skeleton = auto_class.from_config(config, dtype=dtype, trust_remote_code=False)
    model, report = type(skeleton).from_pretrained(
        None, config=config, dtype=dtype, state_dict=weights, output_loading_info=True
    )
    model.name_or_path = path
    model.config.name_or_path = path
    return model, report


def _plain_weights(path: str, quantization: Quantization) -> dict[str, Any]:
    """Return the weights of the model at `path` by name, as slices that are read when they are indexed."""
    key = f"model.path={path}"
    folder = Path(str(cached_file(path, "config.json", local_files_only=True))).parent
    slices = _slices(folder, key)
    parts = _stored_parts(slices, key)
    bare = [
        name
        for name in parts
        if parts[name] == (name,) and slices[name].get_dtype().startswith("F8")
    ]
    if bare:
        raise ConfigError(
            f"{key}: the weight files lack the scales of {bare[0]}. Fetch the model again."
        )

    def read(name: str) -> Tensor:
        tensor: Tensor = slices[name][...]
        return tensor

    return {
        name: slices[name]
        if names == (name,)
        else QuantizedWeight(quantization, names, read, key)
        for name, names in parts.items()
    }


def _slices(folder: Path, key: str) -> dict[str, Any]:
    slices: dict[str, Any] = {}
    for file in list_weight_files(folder, key):
        weights = safe_open(file, framework="pt")  # each slice keeps its file open
        slices |= {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 (not a mapping)
    return slices


def _stored_parts(stored: Iterable[str], key: str) -> dict[str, tuple[str, ...]]:
    """Return the names of the tensors that make up each weight: its values first."""
    names = set(stored)
    for name in sorted(names):
        if name.endswith(UNKNOWN):
            raise _not_read(f"scales and {name.rpartition('.')[2]}", key)
    parts: dict[str, tuple[str, ...]] = {}
    for name in sorted(names):
        packed = name.removesuffix(PACKED[0])
        blocks = name.removesuffix(MXFP4[0])
        suffixes = SCALES if name.endswith(".weight") else SCALES[:1]
        scale = next((name + suffix for suffix in suffixes if name + suffix in names), None)
        if packed != name:
            parts[packed] = (name, packed + PACKED[1], packed + PACKED[2])
        elif blocks != name:
            parts[blocks] = (name, blocks + MXFP4[1])
        elif scale is not None:
            parts[name] = (name, scale)
        else:
            parts[name] = (name,)
    of_parts = {name for of_weight in parts.values() for name in of_weight[1:]}
    if missing := sorted(of_parts - names):
        raise ConfigError(
            f"{key}: the weight files lack {missing[0]}. Fetch the model again."
        )
    return {
        name: of_weight
        for name, of_weight in parts.items()
        if name not in of_parts and not name.endswith(UNREAD)
    }


def _scaled(stored: Tensor, scale: Tensor, block: tuple[int, int], name: str) -> Tensor:
    """Multiply stored values by the scales of their blocks, float32."""
    factors = scale.float()
    if scale.dtype == torch.uint8:  # exponents
        factors = (factors - EXPONENT_BIAS).exp2()
    if scale.numel() == 1:
        return stored.float() * factors.reshape(())
    factors = factors.unsqueeze(-1) if factors.ndim < stored.ndim else factors
    for dim, size in zip((-2, -1), block, strict=True):
        length = stored.shape[dim]
        count = factors.shape[dim]
        width = size if count == math.ceil(length / size) else length // count
        if count != math.ceil(length / width):
            raise ConfigError(
                f"{name} has the shape {tuple(stored.shape)} and scales of {tuple(scale.shape)}, which fit "
                "no blocks. Fetch the model again."
            )
        factors = factors.repeat_interleave(width, dim).narrow(dim, 0, length)
    return stored.float() * factors
