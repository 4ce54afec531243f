"""AdamW and Muon with states of 2 bytes (bfloat16) or 1 byte (int8), rounded stochastically.

    state --read--> float32 --AdamW, some rows at a time--> float32 --write--> state

int8 holds floats of 8 bits. Blocks of up to 256 values in a row share a byte, the exponent of the largest:

    exp_avg     sign, 4 bits of exponent, 3 of fraction: 16 octaves below the block's largest value, then 0
    exp_avg_sq        5 bits of exponent, 3 of fraction: 32 octaves, then the smallest value, as 0 divides

Rounding is exact arithmetic on the bits of float32, with noise that is a hash of the parameter's name, the
step and the element's place in the whole parameter. So a rank's part of a state does not depend on the other
ranks: any layout rounds the same numbers to the same bits, and checkpoints hold plain tensors. torchao's
blocks follow the rank's part of a parameter, it rounds to the nearest value, and it compiles a step for each
shape.
"""

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.adamw import adamw

from workers.model.optimizer.muon import Muon

PIECE = 2**23
"""Elements of a parameter that are in float32 at the same time, unless a row has more."""
BLOCK = 256
SMALLEST_BLOCK = 16
FRACTION_BITS = 3
DROPPED = 23 - FRACTION_BITS  # bits of float32 behind these
DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}
MIXERS = (0x7FEB352D, 0x846CA68B - 2**32)  # of the hash lowbias32
SPREAD = 0x9E3779B1 - 2**32


@dataclass(frozen=True)
class StoredMoment:
    """Read and write one moment of a parameter, of which it holds some rows. block: 0 for whole floats."""

    name: str
    parameter: nn.Parameter
    seed: int
    dtype: torch.dtype
    block: int
    signed: bool = True

    @property
    def exponents(self) -> str:
        return f"{self.name}_exponents"

    def make(self, state: dict[str, Any]) -> None:
        if not self.block:
            state[self.name] = torch.zeros_like(
                self.parameter, dtype=self.dtype, requires_grad=False
            )
            return
        codes = torch.int8 if self.signed else torch.uint8
        state[self.name] = torch.zeros_like(
            self.parameter, dtype=codes, requires_grad=False
        )
        state[self.exponents] = _zeros_of_blocks(self.parameter, self.block)

    def read(self, state: Mapping[str, Any], rows: slice) -> Tensor:
        """Return rows of the moment, float32."""
        codes = _rows_of(state[self.name])[rows]
        if not self.block:
            return codes.float()
        return decode(codes, _rows_of(state[self.exponents])[rows])

    def write(
        self, state: dict[str, Any], rows: slice, values: Tensor, places: Tensor
    ) -> None:
        """Round rows of the moment. places: of the elements in the whole parameter, int32."""
        stored = _rows_of(state[self.name])[rows]
        if self.dtype == torch.float32:
            stored.copy_(values)
            return
        noise = _mixed(places * SPREAD + _mixed(state["step"].int() * SPREAD + self.seed))
        if not self.block:
            stored.copy_(rounded_to_bfloat16(values, noise))
            return
        codes, exponents = encode(values, noise, self.block, signed=self.signed)
        stored.copy_(codes)
        _rows_of(state[self.exponents])[rows].copy_(exponents)


def encode(
    values: Tensor, noise: Tensor, block: int, *, signed: bool
) -> tuple[Tensor, Tensor]:
    """Return int8 or uint8 codes [R, C] of float32 `values`, and uint8 exponents [R, C / block].

    noise: int32 [R, C], of which the low bits decide what is rounded up.
    """
    largest = 127 if signed else 255
    bits = values.abs().view(torch.int32)
    rounded = (bits + (noise & (2**DROPPED - 1))) >> DROPPED
    blocks = rounded.unflatten(-1, (-1, block))
    exponents = blocks.amax(-1) >> FRACTION_BITS
    codes = (blocks - _code_zero(exponents, largest)[..., None]).flatten(-2)
    if signed:
        signed_codes = codes.clamp_(min=0) * values.sign().to(torch.int32)
        return signed_codes.to(torch.int8), exponents.to(torch.uint8)
    return (codes.clamp_(min=1) * (bits > 0)).to(torch.uint8), exponents.to(torch.uint8)


def decode(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return the float32 values that `encode` made codes of."""
    largest = 127 if codes.dtype == torch.int8 else 255
    block = codes.shape[-1] // exponents.shape[-1]
    sizes = codes.to(torch.int32).abs()
    starts = _code_zero(exponents.to(torch.int32), largest).repeat_interleave(block, -1)
    values = ((sizes + starts) << DROPPED).view(torch.float32)
    return torch.where(codes == 0, 0.0, torch.where(codes < 0, -values, values))


def _code_zero(exponents: Tensor, largest: int) -> Tensor:
    """Return the leading bits of the float32 that code 0 would be, if 0 were not 0."""
    return (exponents << FRACTION_BITS) + (2**FRACTION_BITS - 1 - largest)


def rounded_to_bfloat16(values: Tensor, noise: Tensor) -> Tensor:
    bits = values.view(torch.int32) + (noise & 0xFFFF)
    return (bits & ~0xFFFF).view(torch.float32).bfloat16()


def _mixed(numbers: Tensor) -> Tensor:
    """Hash int32 numbers, by lowbias32 (Wellons). Products wrap, shifts are made logical."""
    first, second = MIXERS
    numbers = numbers ^ ((numbers >> 16) & 0xFFFF)
    numbers = numbers * first
    numbers ^= (numbers >> 15) & 0x1FFFF
    numbers *= second
    return numbers ^ ((numbers >> 16) & 0xFFFF)


class LowBitAdamW(torch.optim.AdamW):
    """AdamW with moments of `state_dtype`. names: of parameters, the same in every layout."""

    param_groups: list[dict[str, Any]]

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        state_dtype: str,
        names: Mapping[nn.Parameter, str],
        **options: Any,
    ) -> None:
        super().__init__(groups, **options)
        self._names = names
        self._dtype = DTYPES[state_dtype]
        self._stored: dict[tuple[nn.Parameter, str], StoredMoment] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, group)

    def _step_parameter(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        moments = [
            self._moment(parameter, "exp_avg"),
            self._moment(parameter, "exp_avg_sq", signed=False),
        ]
        state = self._state_of(parameter, moments)
        before = state["step"].clone()
        state["step"] += 1
        beta1, beta2 = group["betas"]
        weight = _rows_of(parameter)
        gradient = _rows_of(parameter.grad)
        for rows, places in pieces(parameter):
            first, second = (moment.read(state, rows) for moment in moments)
            adamw(
                [weight[rows]],
                [gradient[rows]],
                [first],
                [second],
                [],
                [before.clone()],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for moment, values in zip(moments, (first, second), strict=True):
                moment.write(state, rows, values, places)

    def _state_of(
        self, parameter: nn.Parameter, moments: list[StoredMoment]
    ) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment in moments:
                moment.make(state)
        return state

    def _moment(
        self, parameter: nn.Parameter, name: str, *, signed: bool = True
    ) -> StoredMoment:
        if (parameter, name) not in self._stored:
            seed = zlib.crc32(f"{self._names[parameter]}.{name}".encode()) - 2**31
            dtype = self._dtype
            block = block_of(parameter) if dtype == torch.int8 else 0
            if dtype == torch.int8 and not block:
                dtype = torch.float32
            self._stored[parameter, name] = StoredMoment(
                name, parameter, seed, dtype, block, signed
            )
        return self._stored[parameter, name]


class LowBitMuon(Muon, LowBitAdamW):
    """Muon with momentum of `state_dtype`, and `LowBitAdamW` for the groups without momentum."""

    def _update(self, matrix: nn.Parameter, momentum: float) -> Tensor:
        gradient = matrix.grad
        assert gradient is not None
        stored = self._moment(matrix, "momentum_buffer")
        state = self._state_of(matrix, [stored])
        state["step"] += 1
        update = gradient.bfloat16()
        gradients = _rows_of(gradient)
        updates = _rows_of(update)
        for rows, places in pieces(matrix):
            average = stored.read(state, rows).lerp_(gradients[rows], 1 - momentum)
            updates[rows].copy_(gradients[rows].lerp(average, momentum))
            stored.write(state, rows, average, places)
        return update


def pieces(parameter: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield some rows of this rank's part at a time, and their elements' places in the whole, int32."""
    local = _local(parameter)
    shape = local.shape or torch.Size([1])
    offsets = [0] * len(shape)
    strides = [math.prod(parameter.shape[dim + 1 :]) for dim in range(len(shape))]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        _, starts = compute_local_shape_and_global_offset(
            parameter.shape, mesh, parameter.placements
        )
        offsets = list(starts) or offsets
    places = torch.zeros((), dtype=torch.int64, device=local.device)
    for size, offset, stride in zip(shape[:-1], offsets[:-1], strides[:-1], strict=True):
        indices = torch.arange(offset, offset + size, device=local.device)
        places = places[..., None] + indices * stride
    rows = places.flatten().to(torch.int32)
    columns = torch.arange(offsets[-1], offsets[-1] + shape[-1], device=local.device).to(
        torch.int32
    )
    count = max(1, PIECE // max(1, shape[-1]))
    for start in range(0, len(rows) if local.numel() else 0, count):
        part = slice(start, start + count)
        yield part, rows[part, None] + columns


def block_of(parameter: Tensor) -> int:
    """Return the values of a block, a divisor of each rank's part of a row, or 0 for what stays in
    float32.
    """
    if parameter.ndim < 2:
        return 0
    width = parameter.shape[-1]
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            if placement.is_shard(parameter.ndim - 1):
                parts = parameter.device_mesh.size(dim)
                width = width // parts if width % parts == 0 else 1
    block = math.gcd(width, BLOCK)
    return block if block >= SMALLEST_BLOCK else 0


def _zeros_of_blocks(parameter: nn.Parameter, block: int) -> Tensor:
    local = _local(parameter)
    shape = (*local.shape[:-1], local.shape[-1] // block)
    zeros = torch.zeros(shape, dtype=torch.uint8, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    whole = torch.empty(
        (*parameter.shape[:-1], parameter.shape[-1] // block), device="meta"
    )
    sharded = DTensor.from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    # from_local moves offloaded parts to the mesh's device.
    return sharded.to(parameter.device)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rows_of(tensor: Tensor) -> Tensor:
    """Return a view [R, C] of this rank's part: C is the last dimension."""
    local = _local(tensor.detach())
    return local.view(1, local.numel()) if local.ndim < 2 else local.flatten(0, -2)
