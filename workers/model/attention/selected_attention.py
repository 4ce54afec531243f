"""Attention to the earlier tokens that a model's own indexer selects, for each sequence of a packed row.

    layer(hidden, packed_attention=...)      a hook tells the indexer the lengths of the row's segments
      indexer(hidden [1, T, H], ...)         --a segment, a block of queries at a time--> selected [1, T, k]
      ballast_packed(..., indices=selected)  --> attention of each segment to its selected tokens

DeepSeek V3.2, GLM-5 and their kind attend to the `index_topk` earlier tokens of the highest scores. Scored
over the packed row, these would be tokens of other sequences. A sequence of at most `index_topk` tokens
selects all of its tokens, so nothing is scored. transformers computes scores without a gradient: indexers
stay frozen.

Shapes: T tokens of the row, L of one segment, k is `index_topk`, or 0 if no segment is longer.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.errors import UnsupportedModelError
from workers.model.attention.state_rows import StateRow
from workers.model.attention.states import RowHook
from workers.model.rules.families import SELECTED_TOKENS

QUERY_BLOCK = 256
"""Queries that are scored at once. Scores are float32 [block, heads of the indexer, L]."""

ALIGNED_SIZE = 8
"""Kernels on GPUs take heads of multiples of this size."""

NO_MASK = {"indexed_attention": torch.ones(1, 1, 1, 1, dtype=torch.bool)}
"""Stands for the mask that decoders with an indexer slice, and that is not read here."""


def find_indexers(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that select tokens."""
    return [part for part in module.modules() if _selects(part)]


def _selects(part: nn.Module) -> bool:
    return isinstance(getattr(part, SELECTED_TOKENS, None), int) and any(part.children())


def select_by_segment(layers: Iterable[nn.Module], model: str) -> None:
    """Make the indexers of `layers` select within every segment of a packed row.

    model: its name in messages. Raises UnsupportedModelError if no layer has an indexer.
    """
    count = 0
    for layer in layers:
        selectors = [_Selector(indexer) for indexer in find_indexers(layer)]
        if selectors:
            layer.register_forward_pre_hook(RowHook(selectors), with_kwargs=True)
        count += len(selectors)
    if not count:
        raise UnsupportedModelError(
            f"{model} with {SELECTED_TOKENS}: no separate module selects the tokens, so that sequences of a "
            "packed row cannot be told apart. Set model.layout=padded."
        )


class _Selector:
    def __init__(self, indexer: nn.Module) -> None:
        self._indexer = indexer
        self._score: Callable[..., Tensor] = indexer.forward
        self.row: StateRow | None = None  # unless packed
        indexer.forward = self  # type: ignore[method-assign, assignment]

    @torch.compiler.disable  # traced, it would recompile for every list of lengths
    def __call__(
        self,
        hidden: Tensor,
        queries: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor,
        positions: Tensor,
        past_key_values: Any = None,
    ) -> Tensor:
        """Return the places of the selected tokens within their segment, int32 [1, T, k]."""
        if self.row is None:
            return self._score(
                hidden, queries, rotary, mask, positions, past_key_values=past_key_values
            )
        limit = self._indexer.index_topk
        if max(self.row.lengths) <= limit:
            return positions.new_zeros(1, hidden.shape[1], 0, dtype=torch.int32)
        selected = []
        start = 0
        for length in self.row.lengths:
            rows = [
                part[:, start : start + length]
                for part in (hidden, queries, *rotary, positions)
            ]
            selected.append(self._select(rows, length, limit))
            start += length
        return torch.cat(selected, dim=1)

    def _select(self, rows: list[Tensor], length: int, limit: int) -> Tensor:
        if length <= limit:
            return rows[0].new_zeros(1, length, limit, dtype=torch.int32)
        keys = _SegmentKeys()
        blocks = []
        for start, stop in _query_blocks(length):
            hidden, queries, cosines, sines, positions = (
                part[:, start:stop] for part in rows
            )
            visible = hidden.new_ones(1, stop - start, stop, dtype=torch.bool).tril(start)
            places = self._score(
                hidden, queries, (cosines, sines), visible, positions, past_key_values=keys
            )
            # Narrower ones are of queries that see at most `limit` tokens: they attend to all.
            blocks.append(F.pad(places, (0, limit - places.shape[-1])))
        return torch.cat(blocks, dim=1)


class _SegmentKeys:
    """Hold the indexer's keys of a segment's earlier blocks, as transformers' cache does."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def update_indexer(self, keys: Tensor, layer_index: int) -> Tensor:
        self._blocks.append(keys)
        return torch.cat(self._blocks, dim=1)


def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    lengths: Sequence[int],
    selected: Tensor,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of each segment to its selected tokens: [1, H, T, D] three times -> [1, T, H, D].

    selected: int32 [1, T, k], k > 0. sinks: [H], one logit a head, as in `attention.PackedAttention`.
    """
    sizes = list(lengths)
    segments = zip(
        query.split(sizes, dim=2),
        key.split(sizes, dim=2),
        value.split(sizes, dim=2),
        selected.split(sizes, dim=1),
        strict=True,
    )
    outputs = [_attend_segment(*segment, scale, sinks) for segment in segments]
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _attend_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selected: Tensor,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    length = query.shape[2]
    limit = selected.shape[-1]
    size = value.shape[-1]
    more_keys = 0
    if sinks is not None:
        query, key, value = _with_sinks(query, key, value, scale, sinks)
        more_keys = 1
    blocks = []
    for start, stop in _query_blocks(length):
        visible = torch.zeros(stop - start, stop, dtype=torch.bool, device=query.device)
        visible.scatter_(1, selected[0, start:stop].long(), True)
        visible[: max(0, limit - start)] = True
        visible = F.pad(visible.tril(start), (more_keys, 0), value=True)
        seen = slice(0, stop + more_keys)
        blocks.append(
            F.scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, seen],
                value[:, :, seen],
                attn_mask=visible,
                scale=scale,
            )
        )
    return torch.cat(blocks, dim=2)[..., :size]


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a key of the score `sinks` and the value 0 first, by one more number of queries and keys."""
    query = F.pad(query, (0, ALIGNED_SIZE))
    query[..., -1] = 1 / scale
    key = F.pad(key, (0, ALIGNED_SIZE, 1, 0))
    key[:, :, 0, -1] = sinks.to(key.dtype)
    return query, key, F.pad(value, (0, ALIGNED_SIZE, 1, 0))


def _query_blocks(length: int) -> list[tuple[int, int]]:
    return [
        (start, min(start + QUERY_BLOCK, length)) for start in range(0, length, QUERY_BLOCK)
    ]
