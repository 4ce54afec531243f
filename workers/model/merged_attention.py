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

    A position may be several times in `keys`, but not in `queries`. causal: as in `flash_forward`.
    """

    queries: Tensor | None
    keys: Tensor | None
    query_segments: Segments
    key_segments: Segments
    causal: bool


def attend(query: Tensor, key_value: Tensor, scale: float, block: Block, output: Tensor, lse: Tensor) -> None:
    """Merge one block into `output` [T, H, D] and `lse` [H, T], in place."""
    key, value = take(key_value, block.keys, dim=1)
    query = take(query, block.queries, dim=0)
    part, part_lse = flash_forward(query, key, value, block.query_segments, block.key_segments, block.causal, scale)
    before, before_lse = take(output, block.queries, dim=0), take(lse, block.queries, dim=1)
    merged_lse = torch.logaddexp(before_lse, part_lse)
    merged = before * _weight(before_lse, merged_lse) + part * _weight(part_lse, merged_lse)
    _put(output, block.queries, merged, dim=0)
    _put(lse, block.queries, merged_lse, dim=1)


def gradients(
    grad_output: Tensor, query: Tensor, key_value: Tensor, output: Tensor, lse: Tensor, scale: float, block: Block
) -> tuple[Tensor, Tensor]:
    """One block's share of the gradients of its queries [queries, H, D] and of its keys and values [2, keys, K, D]."""
    key, value = take(key_value, block.keys, dim=1)
    rows = [take(tensor, block.queries, dim=0) for tensor in (grad_output, query, output)]
    part_query, part_key, part_value = flash_backward(
        rows[0],
        rows[1],
        key,
        value,
        rows[2],
        take(lse, block.queries, dim=1),
        block.query_segments,
        block.key_segments,
        block.causal,
        scale,
    )
    return part_query, torch.stack([part_key, part_value])


def _weight(part_lse: Tensor, lse: Tensor) -> Tensor:
    """[H, T] -> [T, H, 1]."""
    return torch.exp(part_lse - lse).transpose(0, 1).unsqueeze(-1)


def take(tensor: Tensor, index: Tensor | None, dim: int) -> Tensor:
    """The positions `index` of a dimension; None is all."""
    return tensor if index is None else tensor.index_select(dim, index)


def _put(target: Tensor, index: Tensor | None, values: Tensor, dim: int) -> None:
    if index is None:
        target.copy_(values)
    else:
        target.index_copy_(dim, index, values)


def add(target: Tensor, index: Tensor | None, values: Tensor, dim: int) -> None:
    """Add to the positions `index` of a dimension, in place; None is all."""
    values = values.to(target.dtype)
    if index is None:
        target.add_(values)
    else:
        target.index_add_(dim, index, values)
