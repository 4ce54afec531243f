"""Compile the kernels of FlashAttention 4 for a card that is not here, as rows, rings and windows call them.

    FLASH_ATTENTION_ARCH=sm_90 CUTE_DSL_ARCH=sm_90a FLASH_ATTENTION_NUM_SMS=132 python -m \
tests.workers.model.attention.compile_flash4

On fake tensors, from which the package compiles without a card. A process can compile for one card only.
8 query heads, 2 of keys, with heads first in memory.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from workers.model.attention.flash4 import call_backward, call_forward

KINDS = (
    (128, True, None, 300),
    (128, False, None, 600),
    (64, True, 40, 300),
    (256, True, None, 300),
)
"""(head size, causal, window, key tokens)."""


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


def compile_both_passes(size: int, causal: bool, window: int | None, keys: int) -> None:
    query = half(8, 300, size).transpose(0, 1)
    key, value = (half(2, keys, size).transpose(0, 1) for _ in range(2))
    bounds = torch.empty(4, dtype=torch.int32, device="cuda")
    call = (bounds, bounds, 200, 400, causal, window, 0.1)
    output, lse = call_forward(query, key, value, *call)
    grads = call_backward(half(300, 8, size), query, key, value, output, lse, *call)
    assert output.shape == (300, 8, size)
    assert lse.shape == (8, 300) and lse.dtype == torch.float32
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


def main() -> None:
    for kind in KINDS:
        with FakeTensorMode():
            compile_both_passes(*kind)
        print("compiled", *kind, flush=True)


if __name__ == "__main__":
    main()
