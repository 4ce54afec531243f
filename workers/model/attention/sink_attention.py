"""Attention with sinks (gpt-oss) by flash attention kernels without sinks.

A sink is a key with its own score and the value 0, so it scales the output of plain attention down. Given the output
and log-sum-exp with the sink, the kernels' backward pass is exact for queries, keys and values, as in a ring:

    lse'_i = log(exp(lse_i) + exp(sink))        out'_i = exp(lse_i - lse'_i) out_i
    dsink  = - sum_i exp(sink - lse'_i) dout_i . out'_i

Shapes: T tokens of all segments, H query heads, K key-value heads (K divides H), D head dimension.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.attention.flash_kernels import Block, Segments, flash_backward, flash_forward


def sink_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    segments: Segments,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention of each segment: query [T, H, D], key, value [T, K, D], sinks [H] -> [T, H, D]."""
    block = Block(segments, segments, causal=True, window=window)
    return _SinkAttention.apply(query, key, value, sinks, block, scale)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, block: Block, scale: float
    ) -> Tensor:
        plain, plain_lse = flash_forward(query, key, value, block, scale)
        lse = torch.logaddexp(plain_lse, sinks.to(plain_lse.dtype)[:, None])
        output = (plain * _tokens_first(torch.exp(plain_lse - lse))).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.block, ctx.scale = block, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        grads = flash_backward(grad_output.contiguous(), query, key, value, output, lse, ctx.block, ctx.scale)
        shares = _tokens_first(torch.exp(sinks.to(lse.dtype)[:, None] - lse))
        grad_sinks = -(shares * grad_output * output).sum((0, 2))
        return *grads, grad_sinks.to(sinks.dtype), None, None


def _tokens_first(by_head: Tensor) -> Tensor:
    return by_head.transpose(0, 1).unsqueeze(-1)
