"""Attention in blocks, merged by their log-sum-exp: the parts of a ring, and the prefixes that sequences share.

    block = some queries, which see some keys --flash kernel--> out, lse of these keys --merged--> out, lse of all

(Milakov and Gimelshein 2018, arXiv:1805.02867; Liu et al. 2023, arXiv:2310.01889):

    lse = log(exp(lse_a) + exp(lse_b)),    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Backward: with the out and lse of the whole attention, the flash kernels' backward of one block is that block's exact
share of the gradient.

Shapes: T tokens of this rank's row, H query heads, K key-value heads (K divides H), D head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.flash_kernels import Segments, flash_backward, flash_forward


@dataclass(frozen=True)
class Block:
    """Which queries see which keys. queries, keys: int64 positions in the row, segment after segment; None is all.

    A position may be several times in `keys`, but not in `queries`. causal: only for segments of as many queries as
    keys.
    """

    queries: Tensor | None
    keys: Tensor | None
    query_segments: Segments
    key_segments: Segments
    causal: bool


def attend(query: Tensor, key_value: Tensor, scale: float, block: Block, output: Tensor, lse: Tensor) -> None:
    """Merge one block into `output` [T, H, D] and `lse` [H, T], in place."""
    key, value = _take(key_value, block.keys, dim=1)
    query = _take(query, block.queries, dim=0)
    part, part_lse = flash_forward(query, key, value, block.query_segments, block.key_segments, block.causal, scale)
    before, before_lse = _take(output, block.queries, dim=0), _take(lse, block.queries, dim=1)
    merged_lse = torch.logaddexp(before_lse, part_lse)
    merged = before * _weight(before_lse, merged_lse) + part * _weight(part_lse, merged_lse)
    _put(output, block.queries, merged, dim=0)
    _put(lse, block.queries, merged_lse, dim=1)


def backward(
    grad_output: Tensor,
    query: Tensor,
    key_value: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
    block: Block,
    grad_query: Tensor,
) -> Tensor:
    """Add one block's share to `grad_query` in place; returns that of its keys and values [2, keys, K, D]."""
    key, value = _take(key_value, block.keys, dim=1)
    rows = [_take(tensor, block.queries, dim=0) for tensor in (grad_output, query, output)]
    part_query, part_key, part_value = flash_backward(
        rows[0],
        rows[1],
        key,
        value,
        rows[2],
        _take(lse, block.queries, dim=1),
        block.query_segments,
        block.key_segments,
        block.causal,
        scale,
    )
    add(grad_query, block.queries, part_query, dim=0)
    return torch.stack([part_key, part_value])


def _weight(part_lse: Tensor, lse: Tensor) -> Tensor:
    """[H, T] -> [T, H, 1]."""
    return torch.exp(part_lse - lse).transpose(0, 1).unsqueeze(-1)


def _take(tensor: Tensor, index: Tensor | None, dim: int) -> Tensor:
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
