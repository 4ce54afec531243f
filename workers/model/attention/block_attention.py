"""Causal attention with soft-capping and sinks in blocks of queries, for which torch has no kernel.

    queries i..j --scores against visible keys--> softmax --> output of i..j          one block at a time

All scores of a segment would be H L^2 numbers. Here at most `MOST_SCORES` exist at a time, or the scores of
`FEWEST_QUERIES` queries. The backward pass recomputes them from the log-sum-exp, as flash attention does (Dao
et al. 2022, arXiv:2205.14135, appendix B):

    s_ij  = softcap tanh(scale q_i . k_j / softcap)             lse_i = log(exp(sink) + sum_j exp(s_ij))
    p_ij  = exp(s_ij - lse_i)                                   out_i = sum_j p_ij v_j
    ds_ij = p_ij (dout_i . v_j - delta_i)                       delta_i = dout_i . out_i
    dsink = - sum_i exp(sink - lse_i) delta_i                   a key with the score `sink` and the value 0

flex_attention has no backward pass on a CPU, and recompiles for each kind of layer on CUDA.

Shapes: L tokens of one segment, K key-value heads with G query heads each, H = K G, B queries of a block, N
visible keys, D head dimension.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MOST_SCORES = 2**26
"""Scores of all heads at a time: 256 MiB in float32. Two or three such tensors are held."""
FEWEST_QUERIES = 32
"""Queries of a block for any segment length: with fewer, matrix products are inefficient."""


@dataclass(frozen=True)
class Block:
    start: int
    stop: int
    first: int

    def visible(self, window: int, device: torch.device) -> Tensor:
        queries, keys = (
            torch.arange(begin, self.stop, device=device)
            for begin in (self.start, self.first)
        )
        distance = queries[:, None] - keys
        return (distance >= 0) & (distance < window)


def query_blocks(
    length: int, window: int, heads: int = 1, most_scores: int = MOST_SCORES
) -> list[Block]:
    """Cut a segment into blocks of at most `most_scores` scores, or `FEWEST_QUERIES` queries, and no more
    than the window.
    """
    keys = min(length, 2 * window)
    size = min(window, max(FEWEST_QUERIES, most_scores // (heads * keys)))
    return [
        Block(start, min(start + size, length), max(0, start - window + 1))
        for start in range(0, length, size)
    ]


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    most_scores: int = MOST_SCORES,
) -> Tensor:
    """Compute attention: query [1, H, L, D], key, value [1, K, L, D], sinks [H] -> [1, H, L, D], dtype of
    `query`.

    Sums are in at least float32. Arguments as in `attention.PackedAttention`. Supports first derivatives
    only.
    """
    _, heads, length, _ = query.shape
    grouped = query[0].unflatten(0, (key.shape[1], -1))
    window = length if window is None else min(window, length)
    rule = _Rule(scale, window, softcap, query_blocks(length, window, heads, most_scores))
    return _BlockAttention.apply(grouped, key[0], value[0], sinks, rule).flatten(0, 1)[None]


@dataclass(frozen=True)
class _Rule:
    scale: float
    window: int
    softcap: float | None
    blocks: list[Block]

    def scores(self, query: Tensor, key: Tensor, block: Block) -> Tensor:
        """Return soft-capped, unmasked scores [K, G, B, N] of query [K, G, L, D] and key [K, L, D]."""
        part = query[:, :, block.start : block.stop]
        scores = part.flatten(1, 2) @ key[:, block.first : block.stop].mT
        scores = scores.to(_wide(query)).mul_(self.scale)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        return scores.unflatten(1, part.shape[1:3])


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        rule: _Rule,
    ) -> Tensor:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = torch.empty(query.shape[:3], dtype=_wide(query), device=query.device)
        for block in rule.blocks:
            rows = slice(block.start, block.stop)
            scores = rule.scores(query, key, block)
            scores.masked_fill_(~block.visible(rule.window, query.device), -torch.inf)
            lse[:, :, rows] = _log_sum(scores, sinks)
            weights = scores.sub_(lse[:, :, rows, None]).exp_().to(value.dtype)
            output[:, :, rows] = _product(weights, value[:, block.first : block.stop])
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.rule = rule
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        rule = ctx.rule
        wide = lse.dtype
        delta = (grad_output.to(wide) * output).sum(-1)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (
            torch.zeros_like(tensor, dtype=wide) for tensor in (key, value)
        )
        for block in rule.blocks:
            rows = slice(block.start, block.stop)
            seen = slice(block.first, block.stop)
            scores = rule.scores(query, key, block)
            weights = (scores - lse[:, :, rows, None]).exp_()
            weights.masked_fill_(~block.visible(rule.window, query.device), 0)
            grad_rows = grad_output[:, :, rows]
            grad_value[:, seen] += _transposed_product(weights.to(value.dtype), grad_rows)
            weights.mul_(
                _product(grad_rows, value[:, seen].mT)
                .to(wide)
                .sub_(delta[:, :, rows, None])
            )
            if rule.softcap is not None:
                # The derivative of softcap tanh(x / softcap).
                weights.mul_(1 - scores.div_(rule.softcap).square_())
            grad_scores = weights.mul_(rule.scale).to(query.dtype)
            grad_query[:, :, rows] = _product(grad_scores, key[:, seen])
            grad_key[:, seen] += _transposed_product(grad_scores, query[:, :, rows])
        grad_sinks = None if sinks is None else _sink_gradient(sinks, lse, delta)
        return (
            grad_query,
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            grad_sinks,
            None,
        )


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _log_sum(scores: Tensor, sinks: Tensor | None) -> Tensor:
    lse = scores.logsumexp(-1)
    return lse if sinks is None else torch.logaddexp(lse, _by_group(sinks, lse))


def _sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return [K G]. The sink's value is 0, so its score gets only -delta."""
    weights = torch.exp(_by_group(sinks, lse) - lse)
    return -(weights * delta).sum(-1).flatten().to(sinks.dtype)


def _by_group(sinks: Tensor, lse: Tensor) -> Tensor:
    return sinks.to(lse.dtype).view(*lse.shape[:2], 1)


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    """[K, G, B, X] x [K, X, Y] -> [K, G, B, Y], without repeating keys and values for the heads
    of a group.
    """
    return (rows.flatten(1, 2) @ matrix).unflatten(1, rows.shape[1:3])


def _transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """[K, G, B, X] and [K, G, B, Y] -> [K, X, Y], summed over the heads and queries of a group."""
    return left.flatten(1, 2).mT @ right.flatten(1, 2)
