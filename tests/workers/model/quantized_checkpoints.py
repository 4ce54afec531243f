"""Tiny quantized checkpoints in the formats of the real ones, and the weights that they stand for.

The weights come from formulas of their own, value by value in float64, and not from what reads the files.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Files = dict[str, Tensor]
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
            },
        }
    },
}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "channel",
            },
        }
    },
}


def quantize_blocks(weight: Tensor) -> tuple[Files, Tensor]:
    """fp8 with a scale for each 128 x 128 values, as in DeepSeek V3 and MiniMax M2."""
    rows, columns = weight.shape
    scale = torch.zeros(-(-rows // 128), -(-columns // 128))
    stored = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    plain = torch.zeros(rows, columns, dtype=torch.float64)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            place = (
                slice(128 * row, 128 * row + 128),
                slice(128 * column, 128 * column + 128),
            )
            scale[row, column] = weight[place].abs().max() / 448
            stored[place] = (weight[place] / scale[row, column]).to(stored.dtype)
            plain[place] = stored[place].double() * scale[row, column].double()
    return {"": stored, "_scale_inv": scale}, plain


def quantize_channels(weight: Tensor) -> tuple[Files, Tensor]:
    """fp8 with a scale for each row."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).float()
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {
        "": stored,
        "_scale": scale.bfloat16(),
    }, stored.double() * scale.bfloat16().double()


def quantize_mxfp4(weight: Tensor) -> tuple[Files, Tensor]:
    """Experts [E, A, B] of gpt-oss: 4 bits, and an exponent for each 32 values along A."""
    experts, inner, outer = weight.shape
    groups = weight.transpose(1, 2).reshape(experts, outer, inner // 32, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))).int() - 2
    codes = torch.randint(0, 16, groups.shape, generator=torch.Generator().manual_seed(0))
    sign = 1.0 - 2.0 * (codes >> 3)
    power = (codes >> 1) & 3
    mantissa = (codes & 1).double()
    value = torch.where(
        power == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (power - 1).double()
    )
    plain = sign * value * 2.0 ** exponent[..., None].double()
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    stored = {"_blocks": blocks, "_scales": (exponent + 127).to(torch.uint8)}
    return stored, plain.reshape(experts, outer, inner).transpose(1, 2)


def quantize_int4(weight: Tensor) -> tuple[Files, Tensor]:
    """Eight integers in an int32, with a scale for each 32 columns, as in Kimi K2."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // 32, 32)
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    codes = (groups / scale[..., None]).round().clamp(-8, 7).long()
    plain = (codes.double() * scale[..., None].double()).reshape(rows, columns)
    packed = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for place in range(8):
        packed |= (codes.reshape(rows, columns // 8, 8)[..., place] + 8) << (4 * place)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    return {
        "_packed": packed,
        "_scale": scale,
        "_shape": torch.tensor([rows, columns]),
    }, plain


FORMS = {
    "fp8 blocks": (
        FP8,
        quantize_blocks,
        ("proj.weight", "w1.weight", "w2.weight", "w3.weight"),
    ),
    "fp8 channels": (CHANNELS, quantize_channels, "proj.weight"),
    "mxfp4": (MXFP4, quantize_mxfp4, ("experts.gate_up_proj", "experts.down_proj")),
    "int4": (
        INT4,
        quantize_int4,
        ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    ),
}


def quantize_checkpoint(folder: Path, plain_folder: Path, form: str) -> int:
    """Quantize the model in `folder`, and write the weights that it then stands for to a copy.

    Returns the number of quantized weights.
    """
    description, quantize, suffixes = FORMS[form]
    stored: Files = {}
    plain: Files = {}
    count = 0
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith(suffixes):
            stored[name] = plain[name] = weight
            continue
        parts, exact = quantize(weight)
        plain[name] = exact.float().double()  # parameters are kept in float32
        stored |= {name + suffix: part for suffix, part in parts.items()}
        count += 1
    plain_folder.mkdir()
    for file in folder.iterdir():
        if file.name != "model.safetensors":
            (plain_folder / file.name).write_bytes(file.read_bytes())
    save_file(
        {name: weight.contiguous() for name, weight in plain.items()},
        plain_folder / "model.safetensors",
    )
    save_file(
        {name: part.contiguous() for name, part in stored.items()},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": description})
    )
    return count
