"""vLLM's kernels for norms, as they are offered to engines on a CPU."""

from typing import Any

import pytest
import torch
from vllm import ir

from workers.rollout.cpu_kernels import NORMS, PROVIDER


def arguments(name: str, x: torch.Tensor, weight: torch.Tensor | None) -> tuple[Any, ...]:
    """Of the operator: a norm of x, or of the sum of x and something else."""
    return (x, weight, 1e-6) if name == "rms_norm" else (x, (x * 0.5).contiguous(), weight, 1e-6)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(7, 32), (1, 704), (7, 3, 96)])  # of tokens, or of the heads of tokens
def test_a_kernel_computes_what_vllm_computes_without_it(
    name: str, dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]
):
    torch.manual_seed(0)
    given = arguments(name, torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype))
    operator = getattr(ir.ops, name)
    expected = operator.impls["native"].impl_fn(*given)
    with operator.set_priority([PROVIDER, "native"]):
        assert operator.dispatch(*given).provider == PROVIDER
        found = operator(*given)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NORMS)
def test_what_a_kernel_would_compute_wrongly_or_refuse_is_left_to_vllm(name: str):
    operator, ones = getattr(ir.ops, name), torch.ones
    with operator.set_priority([PROVIDER, "native"]):
        for x, weight in (
            (ones(7, 128)[:, :64], ones(64)),  # rows that are not next to each other
            (ones(7, 40), ones(40)),  # a part of a vector
            (ones(7, 64), None),
            (ones(7, 64, dtype=torch.bfloat16), ones(64)),
        ):
            assert operator.dispatch(*arguments(name, x, weight)).provider == "native"
        assert operator.dispatch(*arguments(name, ones(7, 64), ones(64)), 32).provider == "native"  # of 32 numbers
