"""Attention of a packed row by vLLM's Triton kernel, whose keys and values lie in blocks.

    row      a a a b b b b b b      blocks of 4    | a a a . | b b b b | b b . . |
    table    a: [0]   b: [1, 2]

The kernel goes over the keys of a query in tiles from the first token on, one query like another. So a token
gets the same bits whether its prompt was prefilled, it was decoded alone, or it is trained in a packed row.
The backward pass is that of flash attention, with its own output and log-sum-exp.

Shapes: T packed tokens, B segments, H query heads, K key-value heads, D head dimension, N blocks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workers.model.attention.attention import PackedAttention
from workers.model.attention.flash_kernels import (
    Block,
    Segments,
    flash_backward,
    flash_forward,
)
from workers.model.batch_invariant.kernels import load_kernels
from workers.model.copies import to_device
from workers.model.rows.packing import PackedRow

BLOCK_TOKENS = 16
"""Tokens of a block, as in an engine. The kernel's tiles, and so its bits, do not depend on it."""


def lay_blocks(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the slot of each token, int64 [T], and the blocks of each segment, int32 [B, most blocks]."""
    counts = [-(-length // BLOCK_TOKENS) for length in lengths]
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    slots: list[Tensor] = []
    first = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = torch.arange(first, first + count, dtype=torch.int32)
        slots.append(first * BLOCK_TOKENS + torch.arange(length))
        first += count
    return torch.cat(slots), table


def paged_attention(row: PackedRow, device: torch.device) -> PackedAttention:
    """Return the attention of a row, for all layers of a pass."""
    lengths = row.padded_lengths
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    sent = to_device(
        device, *lay_blocks(lengths), bounds, torch.tensor(lengths, dtype=torch.int32)
    )

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        by_token = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        return invariant_attention(*by_token, *sent, list(lengths), scale).unsqueeze(0)

    return attend


def _in_blocks(tokens: Tensor, slots: Tensor, blocks: int) -> Tensor:
    cells = tokens.new_zeros(blocks * BLOCK_TOKENS, *tokens.shape[1:])
    return cells.index_copy_(0, slots, tokens).unflatten(0, (blocks, BLOCK_TOKENS))


@torch.library.custom_op("ballast::invariant_attention", mutates_args=())
def invariant_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    table: Tensor,
    bounds: Tensor,
    key_lengths: Tensor,
    lengths: Sequence[int],
    scale: float,
) -> Tensor:
    """Compute causal attention of segments: query [T, H, D], key and value [T, K, D] -> [T, H, D].

    slots, table: of `lay_blocks`. bounds: int32 [B + 1]. key_lengths: `lengths` on the device, int32 [B].
    """
    blocks = sum(-(-length // BLOCK_TOKENS) for length in lengths)
    query = query.contiguous()
    output = torch.empty_like(query)
    load_kernels().unified_attention(
        q=query,
        k=_in_blocks(key, slots, blocks),
        v=_in_blocks(value, slots, blocks),
        out=output,
        cu_seqlens_q=bounds,
        max_seqlen_q=max(lengths),
        seqused_k=key_lengths,
        max_seqlen_k=max(lengths),
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1),
        block_table=table,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    return output


@invariant_attention.register_fake
def _attention_shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, _slots, _table, bounds, _key_lengths, ctx.lengths, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, bounds)


def _differentiate_attention(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, bounds = ctx.saved_tensors
    segments = Segments(ctx.lengths, bounds)
    block = Block(segments, segments, causal=True)
    inputs = (query.contiguous(), key.contiguous(), value.contiguous())
    output, lse = flash_forward(*inputs, block, ctx.scale)
    grads = flash_backward(grad.contiguous(), *inputs, output, lse, block, ctx.scale)
    return *grads, *[None] * 6


invariant_attention.register_autograd(
    _differentiate_attention, setup_context=_save_attention
)
