"""FlashAttention 4 (the package flash-attn-4, on CuTe) as two operators with their log-sum-exp.

    query, key, value --ballast::flash4_attention--> out, lse
    out, lse of all keys, and the gradient of out --ballast::flash4_attention_backward--> three gradients

torch's `activate_flash_attention_impl("FA4")` fails with 4.0.0b36, whose forward pass returns five values. So
the forward pass is the package's public function. The backward pass is the function below its autograd:
rings, shared prefixes and sinks give it the log-sum-exp of all keys, which only this function takes.

As operators, recomputation keeps their outputs and the simulated GPU counts them. The package compiles a
kernel at the first call of each kind, in about 11 s.

Shapes: Q query tokens, T key tokens of all segments, B segments, H query heads, K key-value heads (K divides
H), D head dimension.
"""

import inspect
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from workers.errors import ConfigError

PACKAGE = "flash_attn.cute"
DISTRIBUTION = "flash-attn-4"
VERSION = "4.0.0b36"
GENERATIONS = (9, 10)
"""Major compute capabilities: Hopper and Blackwell of data centers."""
CALLED = {
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale "
    "causal window_size return_lse",
    "_flash_attn_bwd": "q k v out dout lse softmax_scale causal window_size_left window_size_right "
    "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k deterministic",
}
"""Functions of the package, with the arguments that they are called with here."""
_is_used = [False]


def use_flash4(is_used: bool) -> None:
    """Choose for all rows of an engine. Raises ConfigError for a package with other functions."""
    if is_used:
        load_package()
    _is_used[0] = is_used


def uses_flash4() -> bool:
    return _is_used[0]


def head_size_problem(generation: int, sizes: frozenset[int]) -> str:
    """Return why kernels of a card do not take heads of these sizes, or an empty string.

    The package's `_validate_head_dims`: 8 to 256 on Hopper, 8 to 128 and 256 on Blackwell, multiples of 8.
    """
    if generation == 9:
        refused_sizes = [size for size in sizes if size % 8 or size > 256]
    else:
        refused_sizes = [size for size in sizes if size % 8 or (size > 128 and size != 256)]
    if not refused_sizes:
        return ""
    return (
        f"does not take heads of {max(refused_sizes)} on a card of compute "
        f"capability {generation}. Set auto"
    )


@cache
def load_package() -> ModuleType:
    """Import the package. Raises ConfigError if its functions do not take what is called here."""
    module = import_module(f"{PACKAGE}.interface")
    for name, arguments in CALLED.items():
        function = getattr(module, name, None)
        parameters = set(inspect.signature(function).parameters) if function else set()
        if missing := set(arguments.split()) - parameters:
            raise ConfigError(
                f"model.attention=flash4: {name} of the installed {DISTRIBUTION} has no "
                f"{', '.join(sorted(missing))}. Install {DISTRIBUTION}=={VERSION}, or set "
                "model.attention=varlen."
            )
    return module


def call_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    longest_query: int,
    longest_key: int,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Call the package: query [Q, H, D], key and value [T, K, D] -> (out [Q, H, D], lse [H, Q])."""
    output, lse = load_package().flash_attn_varlen_func(
        q=query,
        k=key,
        v=value,
        cu_seqlens_q=query_bounds,
        cu_seqlens_k=key_bounds,
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_key,
        softmax_scale=scale,
        causal=causal,
        window_size=_window_size(causal, window),
        return_lse=True,
    )
    return output, lse


def call_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    longest_query: int,
    longest_key: int,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. output, lse: of all keys that the queries see."""
    left, right = _window_size(causal, window)
    grad_query, grad_key, grad_value = load_package()._flash_attn_bwd(
        q=query,
        k=key,
        v=value,
        out=output,
        dout=grad_output,
        lse=lse.contiguous(),
        softmax_scale=scale,
        causal=causal,
        window_size_left=left,
        window_size_right=right,
        cu_seqlens_q=query_bounds,
        cu_seqlens_k=key_bounds,
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_key,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return grad_query, grad_key, grad_value


def _window_size(causal: bool, window: int | None) -> tuple[int | None, int | None]:
    # None is all. The package reads -1 to the left of a causal token as a window that is empty.
    return None if window is None else window - 1, 0 if causal else None


flash4_attention = torch.library.custom_op(
    "ballast::flash4_attention", call_forward, mutates_args=()
)
flash4_attention_backward = torch.library.custom_op(
    "ballast::flash4_attention_backward", call_backward, mutates_args=()
)


@flash4_attention.register_fake
def _forward_shapes(
    query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    queries, heads, _size = query.shape
    return (
        query.new_empty(queries, heads, value.shape[-1]),
        query.new_empty(heads, queries, dtype=torch.float32),
    )


@flash4_attention_backward.register_fake
def _backward_shapes(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, query_bounds, key_bounds, *ctx.plain = inputs
    ctx.save_for_backward(query, key, value, *output, query_bounds, key_bounds)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_output: Tensor, grad_lse: None
) -> tuple[Tensor | None, ...]:
    # Only the output of this operator is used where autograd records it.
    grads = flash4_attention_backward(
        grad_output.contiguous(), *ctx.saved_tensors, *ctx.plain
    )
    return *grads, *[None] * (2 + len(ctx.plain))


flash4_attention.register_autograd(_differentiate, setup_context=_save)
