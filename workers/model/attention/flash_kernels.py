"""Flash attention with its log-sum-exp in and out, and the merging of blocks by it: ring parts, shared
prefixes, sinks.

    block = some queries, which see some keys --flash kernel--> out, lse of these --merged--> of all keys

    lse = log(exp(lse_a) + exp(lse_b)),    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

(Milakov and Gimelshein 2018, arXiv:1805.02867, and Liu et al. 2023, arXiv:2310.01889). Given the out and lse
of the whole attention, the backward kernel of one block returns the exact share of the gradient of that
block.

torch's public functions hide the log-sum-exp or drop its gradient, so the operators below them are used: on
CUDA one call for all segments (half precision only), on the CPU one call a segment. Where an engine uses
FlashAttention 4, its operators take their place (`flash4.py`).

Shapes: Q query tokens, T key tokens of all segments, H query heads, K key-value heads (K divides H), D head
dimension.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.attention.flash4 import (
    flash4_attention,
    flash4_attention_backward,
    uses_flash4,
)
from workers.model.copies import to_device

aten = torch.ops.aten


@dataclass(frozen=True)
class Segments:
    """Hold the segments of a ragged tensor. bounds: cumulative lengths from 0, int32 [B + 1] on
    the device.
    """

    lengths: Sequence[int]
    bounds: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Segments":
        return cls(
            lengths,
            *to_device(device, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)),
        )

    @property
    def longest(self) -> int:
        return max(self.lengths)


@dataclass(frozen=True)
class Block:
    """Define which queries see which keys, segment by segment. A segment has at most as many queries as keys.

    causal: the last query of a segment sees all its keys. queries, keys: int64 positions in the row, None is
    all. A position may be repeated in `keys`, not in `queries`. window: tokens that each token sees, itself
    included, only if causal.
    """

    query_segments: Segments
    key_segments: Segments
    causal: bool
    queries: Tensor | None = None
    keys: Tensor | None = None
    window: int | None = None


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the attention of a block's queries [Q, H, D] over its key and value [T, K, D].

    Returns (out [Q, H, D], natural log-sum-exp of the scaled scores [H, Q]). On the CPU a window, or fewer
    queries than keys, builds a mask of all pairs.
    """
    if uses_flash4():
        return flash4_attention(
            query, key, value, *_on_cuda(block), block.causal, block.window, scale
        )
    if query.device.type != "cpu":
        cuda_arguments, (left, right) = (
            _on_cuda(block),
            window_size(block.causal, block.window),
        )
        output, lse, *_ = aten._flash_attention_forward(
            query,
            key,
            value,
            *cuda_arguments,
            0.0,
            block.causal,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return output, lse
    outputs = []
    sums = []
    for q, k, v in _segments_on_cpu(query, key, value, block):
        mask = _mask_on_cpu(q, k, block)
        plain = block.causal and mask is None
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, plain, attn_mask=mask, scale=scale
        )
        outputs.append(out[0].transpose(0, 1))
        sums.append(lse[0])
    return torch.cat(outputs), torch.cat(sums, dim=1)


def flash_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block's share in the gradients of query, key and value, from output and log-sum-exp over all
    keys.
    """
    if uses_flash4():
        inputs_of_all = (grad_output, query, key, value, output, lse)
        return flash4_attention_backward(
            *inputs_of_all, *_on_cuda(block), block.causal, block.window, scale
        )
    if query.device.type != "cpu":
        # State of an unused generator.
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        cuda_arguments, (left, right) = (
            _on_cuda(block),
            window_size(block.causal, block.window),
        )
        return aten._flash_attention_backward(
            grad_output,
            query,
            key,
            value,
            output,
            lse.contiguous(),
            *cuda_arguments,
            0.0,
            block.causal,
            no_dropout,
            no_dropout,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
    grads: list[tuple[Tensor, ...]] = []
    of_queries = zip(
        _split(grad_output, block.query_segments),
        _split(output, block.query_segments),
        lse.split(block.query_segments.lengths, dim=1),
        strict=True,
    )
    for (q, k, v), (grad, out, sums) in zip(
        _segments_on_cpu(query, key, value, block), of_queries, strict=True
    ):
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        mask = _mask_on_cpu(q, k, block)
        inputs = (grad, q, k, v, out, sums[None].contiguous())
        grads.append(
            backward(
                *inputs, 0.0, block.causal and mask is None, attn_mask=mask, scale=scale
            )
        )

    def join(parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([part[0].transpose(0, 1) for part in parts])

    grad_query, grad_key, grad_value = map(join, zip(*grads, strict=True))
    return grad_query, _sum_repeats(grad_key, key), _sum_repeats(grad_value, value)


def _on_cuda(block: Block) -> tuple[Tensor, Tensor, int, int]:
    queries = block.query_segments
    keys = block.key_segments
    return queries.bounds, keys.bounds, queries.longest, keys.longest


def window_size(causal: bool, window: int | None) -> tuple[int, int]:
    """Return (tokens seen to the left, to the right) of the token, -1 for all."""
    return -1 if window is None else window - 1, 0 if causal else -1


def _mask_on_cpu(query: Tensor, key: Tensor, block: Block) -> Tensor | None:
    queries = query.shape[2]
    keys = key.shape[2]
    window = block.window
    if not block.causal or (window is None and queries == keys):
        return None
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    hidden = (distance < 0) | (distance >= (window or keys))
    return torch.zeros(queries, keys, dtype=query.dtype).masked_fill(hidden, -torch.inf)


def _segments_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, block: Block
) -> list[tuple[Tensor, Tensor, Tensor]]:
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    keys = block.key_segments
    return list(
        zip(
            _split(query, block.query_segments),
            _split(key, keys),
            _split(value, keys),
            strict=True,
        )
    )


def _split(tensor: Tensor, segments: Segments) -> list[Tensor]:
    return [part.transpose(0, 1)[None] for part in tensor.split(segments.lengths)]


def _sum_repeats(grad: Tensor, like: Tensor) -> Tensor:
    return grad.view(len(like), like.shape[1], -1, like.shape[2]).sum(2)


def attend(
    query: Tensor,
    key_value: Tensor,
    scale: float,
    block: Block,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Merge one block into `output` [T, H, D] and `lse` [H, T], in place."""
    key, value = take(key_value, block.keys, dim=1)
    query = take(query, block.queries, dim=0)
    part, part_lse = flash_forward(query, key, value, block, scale)
    before_output = take(output, block.queries, dim=0)
    before_lse = take(lse, block.queries, dim=1)
    merged_lse = torch.logaddexp(before_lse, part_lse)
    merged = before_output * _weight(before_lse, merged_lse) + part * _weight(
        part_lse, merged_lse
    )
    _put(output, block.queries, merged, dim=0)
    _put(lse, block.queries, merged_lse, dim=1)


def gradients(
    grad_output: Tensor,
    query: Tensor,
    key_value: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
    block: Block,
) -> tuple[Tensor, Tensor]:
    """Return one block's share of the gradients of queries [queries, H, D] and keys and values [2, keys, K,
    D].
    """
    key, value = take(key_value, block.keys, dim=1)
    grad_output, query, output = (
        take(tensor, block.queries, dim=0) for tensor in (grad_output, query, output)
    )
    lse = take(lse, block.queries, dim=1)
    part_query, part_key, part_value = flash_backward(
        grad_output, query, key, value, output, lse, block, scale
    )
    return part_query, torch.stack([part_key, part_value])


def _weight(part_lse: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(part_lse - lse).transpose(0, 1).unsqueeze(-1)


def take(tensor: Tensor, index: Tensor | None, dim: int) -> Tensor:
    return tensor if index is None else tensor.index_select(dim, index)


def _put(target: Tensor, index: Tensor | None, values: Tensor, dim: int) -> None:
    if index is None:
        target.copy_(values)
    else:
        target.index_copy_(dim, index, values)


def add(target: Tensor, index: Tensor | None, values: Tensor, dim: int) -> None:
    values = values.to(target.dtype)
    if index is None:
        target.add_(values)
    else:
        target.index_add_(dim, index, values)


def sink_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    segments: Segments,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention with sinks (gpt-oss): query [T, H, D], key, value [T, K, D], sinks [H] -> [T,
    H, D].

    A sink is a key with its own score and the value 0, so it scales the output of plain attention down. Given
    output and log-sum-exp with the sink, the kernels' backward pass is exact for queries, keys and values.

        lse'_i = log(exp(lse_i) + exp(sink))        out'_i = exp(lse_i - lse'_i) out_i
        dsink  = - sum_i exp(sink - lse'_i) dout_i . out'_i
    """
    block = Block(segments, segments, causal=True, window=window)
    return _SinkAttention.apply(query, key, value, sinks, block, scale)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        block: Block,
        scale: float,
    ) -> Tensor:
        plain, plain_lse = flash_forward(query, key, value, block, scale)
        lse = torch.logaddexp(plain_lse, sinks.to(plain_lse.dtype)[:, None])
        output = (plain * _weight(plain_lse, lse)).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.block = block
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        grads = flash_backward(
            grad_output.contiguous(), query, key, value, output, lse, ctx.block, ctx.scale
        )
        shares = _weight(sinks.to(lse.dtype)[:, None], lse)
        grad_sinks = -(shares * grad_output * output).sum((0, 2))
        return *grads, grad_sinks.to(sinks.dtype), None, None
