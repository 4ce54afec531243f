"""Frozen weights of linear modules in 8 or 4 bits, below adapters (QLoRA, Dettmers et al. 2023).

    weight [out, in] --quantize--> codes int8 [out, in], or two of 4 bits in a byte: uint8 [out, in / 2]
                                   scales bfloat16 [out, in / block]
    forward, backward: codes * scales --> weight in the input's type --product--> freed

    int8   -127 to 127, times scale = largest of the block / 127
    nf4    16 quantiles of a normal distribution between -1 and 1, times scale = largest of the block

Blocks lie within a row, and quantizing comes before sharding. So every layout holds the same numbers, and
ranks share codes and scales by the same rows. FSDP2 casts floats to the type of the computation, which leaves
scales of bfloat16 as they are. A weight of float32 would be rounded there, and differ from what engines get.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from workers.errors import ConfigError

BLOCK = 64
SMALLEST_BLOCK = 16
LARGEST = 127
# fmt: off
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)
# fmt: on
"""The paper's appendix E."""


class LowBitLinear(nn.Linear):
    """Compute as the frozen `linear` does, with its weight rounded to `base_dtype`: `int8` or `nf4`."""

    def __init__(self, linear: nn.Linear, base_dtype: str) -> None:
        nn.Module.__init__(self)
        codes, scales = quantize(linear.weight.detach(), base_dtype)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        # Made here, not in each pass: that would copy from the host to the GPU.
        pairs = _pairs(codes.device) if base_dtype == "nf4" else None
        self.register_buffer("pairs", pairs, persistent=False)
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = _LinearOfCodes.apply(
            input, self.codes, self.scales, self.pairs, self.bias
        )
        return result

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The rounded weight, float32, or this rank's part of it."""
        return dequantize(self.codes.detach(), self.scales.detach(), self.pairs)


class _LinearOfCodes(torch.autograd.Function):
    """Keep codes for the backward pass, not the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        pairs: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, pairs)
        return functional.linear(x, dequantize(codes, scales, pairs).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        weight = dequantize(*ctx.saved_tensors)
        return gradient @ weight.to(gradient.dtype), None, None, None, None


def quantize(weight: Tensor, base_dtype: str) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a weight [out, in], which may be on the meta device."""
    block = block_of(weight.shape[-1])
    blocks = weight.float().unflatten(-1, (-1, block))
    levels = LARGEST if base_dtype == "int8" else 1
    scales = (blocks.abs().amax(-1) / levels).bfloat16()
    divisors = scales.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    units = blocks / divisors
    if base_dtype == "int8":
        codes = units.round_().clamp_(-LARGEST, LARGEST).flatten(-2)
        return codes.to(torch.int8), scales
    table = torch.tensor(NF4, device=weight.device)
    middles = (table[1:] + table[:-1]) / 2
    indices = torch.bucketize(units.flatten(-2), middles, out_int32=True)
    pairs = indices.unflatten(-1, (-1, 2)).to(torch.uint8)
    return pairs[..., 0] * 16 + pairs[..., 1], scales


def dequantize(codes: Tensor, scales: Tensor, pairs: Tensor | None = None) -> Tensor:
    """Return the weight, float32 [out, in], that `quantize` made codes and scales of. pairs: the module's, or
    None.
    """
    if isinstance(codes, DTensor) and isinstance(scales, DTensor):
        local = dequantize(codes.to_local(), scales.to_local(), pairs)
        width = codes.shape[-1] * (1 if codes.dtype == torch.int8 else 2)
        return DTensor.from_local(
            local,
            codes.device_mesh,
            codes.placements,
            run_check=False,
            shape=torch.Size((codes.shape[0], width)),
            stride=(width, 1),
        )
    if codes.dtype == torch.int8:
        values = codes.float()
    else:
        pairs = _pairs(codes.device) if pairs is None else pairs
        # With cpu_offload=all the module's table stays on the host, where FSDP2 leaves buffers.
        pairs = pairs.to(codes.device)
        values = functional.embedding(codes.int(), pairs).flatten(-2)
    blocks = values.unflatten(-1, (scales.shape[-1], -1))
    return (blocks * scales.float()[..., None]).flatten(-2)


def _pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte of nf4, float32 [256, 2]."""
    table = torch.tensor(NF4, device=device)
    return torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=-1)


def narrow_frozen(model: nn.Module, dtype: torch.dtype, tower: set[nn.Parameter]) -> None:
    """Keep frozen floats that are wider in `dtype`, in place, except those of `tower`."""
    narrow: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight has two places
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if (
                parameter.requires_grad
                or parameter in tower
                or parameter.itemsize <= dtype.itemsize
            ):
                continue
            if parameter not in narrow:
                narrow[parameter] = nn.Parameter(
                    parameter.detach().to(dtype), requires_grad=False
                )
            setattr(module, name, narrow[parameter])


def block_of(width: int) -> int:
    """Return the values of a row that share a scale, or 0 if too few would."""
    block = math.gcd(width, BLOCK)
    return block if block >= SMALLEST_BLOCK else 0


def check_width(
    linear: nn.Linear, name: str, base_dtype: str, tensor_parallel: int
) -> None:
    """Raise ConfigError unless rows of a module's weight are whole blocks, on each rank of a tensor-parallel
    group.
    """
    width = linear.in_features
    block = block_of(width)
    if not block:
        raise ConfigError(
            f"model.base_dtype={base_dtype}: {name} has rows of {width} values, which are not a multiple of "
            f"{SMALLEST_BLOCK}. Set bfloat16, or name other modules in model.lora.target_modules."
        )
    if width // block % tensor_parallel:
        raise ConfigError(
            f"policy.parallel.tensor_parallel={tensor_parallel}: with model.base_dtype={base_dtype}, {name} "
            f"has rows of {width // block} blocks of {block} values, which it does not divide. Set a divisor."
        )
