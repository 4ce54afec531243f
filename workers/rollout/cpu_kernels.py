"""Register vLLM's RMSNorm kernels for CPUs, which vLLM 0.32 has but offers to GPUs alone.

    x --contiguous, whole vectors, weight of its type?--> the kernel          one call
                                                     no --> vLLM's own way    eight calls of torch

The eight calls take a tenth of a small model's time. The engine's `ir_op_priority` names the kernels.
"""

import torch
from torch import Tensor
from vllm import _custom_ops, ir
from vllm.platforms import current_platform

PROVIDER = "ballast_cpu"
NORMS = ("rms_norm", "fused_add_rms_norm")
LANES = 32  # numbers in the longest vector, of which a kernel takes whole ones


def _fits(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    plain = variance_size is None and weight is not None and weight.dtype == x.dtype
    return plain and x.is_contiguous() and x.shape[-1] % LANES == 0


def _norm_fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _fits(x, weight, variance_size)


def _sum_fits(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _fits(x, weight, variance_size) and x_residual.is_contiguous() and x_residual.dtype == x.dtype


@ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_norm_fits, supported=current_platform.is_cpu())
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """RMSNorm of the last dimension of x, times weight."""
    out = torch.empty_like(x)
    _custom_ops.rms_norm(out, x, weight, epsilon)
    return out


@ir.ops.fused_add_rms_norm.register_impl(
    PROVIDER, supports_args=_sum_fits, supported=current_platform.is_cpu(), inplace=True
)
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """(RMSNorm of x + x_residual, their sum), in place of x and x_residual."""
    _custom_ops.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
