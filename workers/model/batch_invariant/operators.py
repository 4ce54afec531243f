"""Matrix product, norms, gate and rotation as operators: forward by vLLM, backward by ordinary kernels.

    linear    y = x W^T                         W: the rows of all `weights`, one below the other
    norm      y = x / sqrt(mean(x^2) + eps) w
    gate      y = silu(a) b                     a, b: the halves of x
    rotate    (a cos - b sin, b cos + a sin)    a, b: the halves of a head

A gradient needs no batch invariance: it equals what autograd gives for these formulas, up to rounding.

Shapes: T tokens, I and O sizes of a matrix, H and K heads of queries and keys, D head dimension.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.batch_invariant.kernels import load_kernels


@torch.library.custom_op("ballast::invariant_linear", mutates_args=())
def invariant_linear(tokens: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Multiply tokens [T, I] by the transposed rows of all weights [O_i, I] -> [T, sum of O_i].

    In one product, as vLLM's merged layers: a tuned block size depends on the number of rows.
    """
    return load_kernels().linear_batch_invariant(tokens, torch.cat(list(weights)), None)


@invariant_linear.register_fake
def _linear_shape(tokens: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return tokens.new_empty(len(tokens), sum(len(weight) for weight in weights))


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tokens, weights = inputs
    ctx.save_for_backward(tokens, *weights)


def _differentiate_linear(
    ctx: Any, grad: Tensor
) -> tuple[Tensor | None, list[Tensor] | None]:
    tokens, *weights = ctx.saved_tensors
    grad_tokens = grad @ torch.cat(weights) if ctx.needs_input_grad[0] else None
    parts = grad.split([len(weight) for weight in weights], dim=1)
    return grad_tokens, [part.T @ tokens for part in parts]


invariant_linear.register_autograd(_differentiate_linear, setup_context=_save_linear)


@torch.library.custom_op("ballast::invariant_norm", mutates_args=())
def invariant_norm(rows: Tensor, weight: Tensor, eps: float, of_sum: bool) -> Tensor:
    """Normalize rows [..., I] by their root mean square. weight: [I].

    of_sum: whether vLLM adds a residual in the same kernel, which rounds otherwise than that without. A
    residual of 0 leaves the sum of transformers as it is.
    """
    kernels = load_kernels()
    if not of_sum:
        return kernels.rms_norm_batch_invariant(rows, weight, eps)
    result = rows.clone(memory_format=torch.contiguous_format)
    kernels.fused_add_rms_norm(result, torch.zeros_like(result), weight, eps)
    return result


@invariant_norm.register_fake
def _norm_shape(rows: Tensor, weight: Tensor, eps: float, of_sum: bool) -> Tensor:
    return rows.new_empty(rows.shape)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, ctx.eps, _of_sum = inputs
    ctx.save_for_backward(rows, weight)


def _differentiate_norm(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight = ctx.saved_tensors
    dtype = torch.promote_types(rows.dtype, torch.float32)
    wide = rows.to(dtype)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
    unit = wide * inverse
    wide_grad = grad.to(dtype)
    grad_unit = wide_grad * weight.to(dtype)
    along = (grad_unit * unit).mean(-1, keepdim=True)
    grad_rows = (inverse * (grad_unit - unit * along)).to(rows.dtype)
    grad_weight = (wide_grad * unit).flatten(0, -2).sum(0).to(weight.dtype)
    return grad_rows, grad_weight, None, None


invariant_norm.register_autograd(_differentiate_norm, setup_context=_save_norm)


@torch.library.custom_op("ballast::invariant_gate", mutates_args=())
def invariant_gate(halves: Tensor) -> Tensor:
    """Compute silu of the first half times the second: [T, 2 I] -> [T, I]."""
    result = halves.new_empty(len(halves), halves.shape[1] // 2)
    load_kernels().silu_and_mul(result, halves)
    return result


@invariant_gate.register_fake
def _gate_shape(halves: Tensor) -> Tensor:
    return halves.new_empty(len(halves), halves.shape[1] // 2)


def _save_gate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_gate(ctx: Any, grad: Tensor) -> Tensor:
    (halves,) = ctx.saved_tensors
    dtype = torch.promote_types(halves.dtype, torch.float32)
    gate, other = halves.to(dtype).chunk(2, dim=1)
    share = torch.sigmoid(gate)
    wide_grad = grad.to(dtype)
    grad_gate = wide_grad * other * share * (1 + gate * (1 - share))
    grad_other = wide_grad * F.silu(gate)
    return torch.cat([grad_gate, grad_other], dim=1).to(halves.dtype)


invariant_gate.register_autograd(_differentiate_gate, setup_context=_save_gate)


@torch.library.custom_op("ballast::invariant_rotation", mutates_args=())
def invariant_rotation(
    query: Tensor, key: Tensor, positions: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate query [T, H, D] and key [T, K, D]. positions: int64 [T], rows of `rotary_table`."""
    rotated_query = query.clone(memory_format=torch.contiguous_format)
    rotated_key = key.clone(memory_format=torch.contiguous_format)
    size = query.shape[-1]
    load_kernels().rotary_embedding(
        positions, rotated_query.flatten(1), rotated_key.flatten(1), size, table, True
    )
    return rotated_query, rotated_key


@invariant_rotation.register_fake
def _rotation_shape(
    query: Tensor, key: Tensor, positions: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _save_rotation(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    _query, _key, positions, table = inputs
    ctx.save_for_backward(positions, table)


def _differentiate_rotation(
    ctx: Any, grad_query: Tensor, grad_key: Tensor
) -> tuple[Tensor | None, ...]:
    positions, table = ctx.saved_tensors
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate_back(grad_query, cos, sin), _rotate_back(grad_key, cos, sin), None, None


def _rotate_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = grad.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


invariant_rotation.register_autograd(_differentiate_rotation, setup_context=_save_rotation)


def rotary_table(
    positions: int, size: int, base: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return cosines and sines of all positions [positions, D], as vLLM's `RotaryEmbedding` has them.

    On the device, as there: powers and cosines of a CPU differ from those of a card in the last bit.
    """
    steps = torch.arange(0, size, 2, dtype=torch.float, device=device)
    frequencies = 1.0 / (base ** (steps / size))
    numbers = torch.arange(positions, dtype=torch.float, device=device)
    angles = torch.einsum("i,j -> ij", numbers, frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
