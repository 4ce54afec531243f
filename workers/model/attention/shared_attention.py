"""Attention of a row in which sequences share their prefixes (`prefix_rows.py`).

    a call a level     level 0: every run, causal over itself. Level n: the runs that continue a prefix, over
                       it. Merged by their log-sum-exp (`flash_kernels.py`)
    a call a path      every run over the cells before it on its path, and causal over itself. Keys are copied
    a call a tree      a run and its continuations, with a mask that hides cells off its path

On CUDA a level is one flash kernel call, and so are all paths of a row together: short rows, which the host
slows down, use paths, others levels. On a CPU a level is one call a run. Trees are faster for short runs,
although they also compute the masked scores.

Shapes: W cells of the row, H query heads, K key-value heads, D head dimension.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.attention.flash_kernels import (
    Block,
    Segments,
    add,
    attend,
    flash_forward,
    gradients,
    take,
)
from workers.model.attention.state_rows import StateRow
from workers.model.copies import to_device
from workers.model.rows.prefix_rows import Run, SharedRow, Stripe

WHOLE = Stripe(0, 1)
PRODUCTS_OF_A_CALL = 2**20
"""Masked products worth one call less, in the forward pass. Measured on AVX-512, forward and backward: even
at 2^20 to 2^22.
"""
COPIES_OF_A_LEVEL = 2**23
"""Copied key elements worth one level less, on CUDA. An estimate, not yet measured: a level takes about 26
small kernels, forward and backward, 0.13 to 0.26 ms of the host. Copying these elements, and as many of the
values, and adding their gradients takes 0.15 ms at 3 TB/s, and 32 MiB in half precision.
"""


class SharedAttention:
    def __init__(self, row: SharedRow, device: torch.device) -> None:
        self.states = StateRow.of(row, device)
        self._row = row
        self._device = device
        self._trees = list(trees_of(row))
        self._widest_by_tree = widest_by_tree(self._trees)
        self._widest_by_path = widest_by_path(row)
        self._masks: list[Tensor | None] = []

    @cached_property
    def _levels(self) -> tuple[Block, ...]:
        return attention_blocks(self._row, WHOLE, WHOLE, self._device)

    @cached_property
    def _paths(self) -> tuple[Block, ...]:
        return (path_block(self._row, self._device),)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [1, H, W, D], key and value [1, K, W, D] -> [1, W, H, D]."""
        way = self._way(query, key)
        if way == "tree":
            return self._by_tree(query, key, value, scale)
        query, key, value = (
            tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)
        )
        blocks = self._paths if way == "path" else self._levels
        return _SharedAttention.apply(query, torch.stack([key, value]), scale, blocks)[None]

    def _way(self, query: Tensor, key: Tensor) -> Literal["level", "path", "tree"]:
        if query.is_cuda:
            return (
                "path" if key.shape[1] * key.shape[3] <= self._widest_by_path else "level"
            )
        return (
            "tree" if query.shape[1] * query.shape[3] <= self._widest_by_tree else "level"
        )

    def _by_tree(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self._masks = self._masks or [tree.mask(query.dtype) for tree in self._trees]
        cells = [tree.cells for tree in self._trees]
        parts = zip(
            *(tensor.split(cells, dim=2) for tensor in (query, key, value)), strict=True
        )
        outputs = [
            F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
            for (q, k, v), mask in zip(parts, self._masks, strict=True)
        ]
        return torch.cat(outputs, dim=2).transpose(1, 2)


@dataclass(frozen=True)
class Tree:
    """Hold consecutive runs of a row: one and its continuations, or the padding. before: runs of the row
    before.
    """

    runs: tuple[Run, ...]
    before: int

    @property
    def cells(self) -> int:
        return sum(run.length for run in self.runs)

    @property
    def hidden(self) -> int:
        if len(self.runs) == 1:
            return 0
        return self.cells**2 - sum(
            run.length * (run.length + 1) // 2 + run.length * run.depth for run in self.runs
        )

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Return [cells, cells], 0 where a cell (row) sees another and -inf elsewhere, or None for a lone
        run.
        """
        if len(self.runs) == 1:
            return None
        mask = torch.full((self.cells, self.cells), -torch.inf, dtype=dtype)
        for run in self.runs:
            first = run.first - self.runs[0].first
            run_mask = mask[first : first + run.length]
            run_mask[:, first : first + run.length] = mask.new_full(
                (run.length, run.length), -torch.inf
            ).triu(1)
            if run.level:
                above = self.runs[run.parent - self.before].first - self.runs[0].first
                # A row sees all that the prefix's last cell sees.
                run_mask[:, :first] = mask[above + run.shared - 1, :first]
        return mask


def trees_of(row: SharedRow) -> Iterator[Tree]:
    starts = [index for index, run in enumerate(row.runs) if run.level == 0]
    for start, stop in zip(starts, [*starts[1:], len(row.runs)], strict=True):
        yield Tree(row.runs[start:stop], start)
    used = row.lengths[0]
    width = row.padded_lengths[0]
    if used < width:
        yield Tree((Run(used, width - used, 0, -1, 0, 0),), len(row.runs))


def widest_by_tree(trees: Sequence[Tree]) -> int:
    """Return heads times head dimension up to which a call a tree is faster than one a run, on a CPU."""
    fewer = sum(len(tree.runs) - 1 for tree in trees)
    return PRODUCTS_OF_A_CALL * fewer // max(1, sum(tree.hidden for tree in trees))


def widest_by_path(row: SharedRow) -> int:
    """Return key heads times head dimension up to which a call a path is faster than one a level, on CUDA."""
    levels = max(run.level for run in row.runs)
    return COPIES_OF_A_LEVEL * levels // sum(run.depth + run.length for run in row.runs)


def path_block(row: SharedRow, device: torch.device) -> Block:
    seen: list[Tensor] = []  # by run, the cells of its path and its own
    for run in row.runs:
        prefix_cells = (
            seen[run.parent][: run.depth]
            if run.level
            else torch.empty(0, dtype=torch.int64)
        )
        seen.append(
            torch.cat([prefix_cells, torch.arange(run.first, run.first + run.length)])
        )
    queries = [run.length for run in row.runs]
    if row.lengths[0] < row.padded_lengths[0]:
        seen.append(torch.arange(row.lengths[0], row.padded_lengths[0]))
        queries.append(len(seen[-1]))
    keys = Segments.of([len(cells) for cells in seen], device)
    return Block(
        Segments.of(queries, device),
        keys,
        causal=True,
        keys=to_device(device, torch.cat(seen))[0],
    )


def ring_blocks(
    row: SharedRow, rank: int, size: int, device: torch.device
) -> list[tuple[Block, ...]]:
    """Return, by step of a ring, the blocks of rank `rank` of `size` with the keys of rank `rank - step`."""
    stripes = [Stripe(index, size) for index in range(size)]
    return [
        attention_blocks(row, stripes[rank], stripes[rank - step], device)
        for step in range(size)
    ]


def attention_blocks(
    row: SharedRow, queries: Stripe, keys: Stripe, device: torch.device
) -> tuple[Block, ...]:
    """Return the non-empty blocks, level 0 first, in which cells of stripe `queries` see cells of stripe
    `keys`.
    """
    runs = [range(run.first, run.first + run.length) for run in row.runs]
    padding = range(row.lengths[0], row.padded_lengths[0])
    cells = row.padded_lengths[0] // queries.size
    blocks = [
        _block(
            [_causal(run, queries, keys) for run in (*runs, padding)],
            device,
            causal_over=cells,
        )
    ]
    for level in range(1, max(run.level for run in row.runs) + 1):
        seen = [
            (queries.of(seeing), keys.of(prefix))
            for seeing, prefix in _level(row.runs, level)
        ]
        blocks.append(_block(seen, device))
    return tuple(block for block in blocks if block)


def _causal(run: range, queries: Stripe, keys: Stripe) -> tuple[range, range]:
    """Return as many queries as keys of one run, each query seeing the keys up to its own place.

    At most one query that sees no key, and one key that no query sees, are left out.
    """
    run_queries = queries.of(run)
    seen = keys.of(run)
    later = int(keys.rank > queries.rank)
    return range(seen.start + later, run_queries.stop), range(
        seen.start, run_queries.stop - later
    )


def _level(runs: Sequence[Run], level: int) -> list[tuple[range, range]]:
    stops: dict[
        tuple[int, int], list[int]
    ] = {}  # by prefix: start and stop of the cells that see it
    prefix = (-1, 0)
    for run in runs:
        if run.level == level:
            prefix = (run.parent, run.shared)
            stops.setdefault(prefix, [run.first, run.first])
        if run.level >= level:
            stops[prefix][1] = run.first + run.length
    return [
        (range(*seeing), range(runs[parent].first, runs[parent].first + shared))
        for (parent, shared), seeing in stops.items()
    ]


def _block(
    segments: Sequence[tuple[range, range]], device: torch.device, causal_over: int = 0
) -> Block | None:
    """Return the block of the non-empty (queries, keys), or None.

    causal_over: cells of a stripe, 0 for a full block.
    """
    queries = [seeing for seeing, seen in segments if seeing and seen]
    keys = [seen for seeing, seen in segments if seeing and seen]
    if not queries:
        return None
    is_whole = sum(map(len, queries)) == causal_over
    return Block(
        Segments.of(list(map(len, queries)), device),
        Segments.of(list(map(len, keys)), device),
        causal=causal_over > 0,
        queries=None if is_whole else _positions(queries, device),
        keys=None if is_whole else _positions(keys, device),
    )


def _positions(ranges: Sequence[range], device: torch.device) -> Tensor:
    return to_device(
        device, torch.cat([torch.arange(part.start, part.stop) for part in ranges])
    )[0]


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key_value: Tensor, scale: float, blocks: Sequence[Block]
    ) -> Tensor:
        """query [W, H, D], key_value [2, W, K, D] -> [W, H, D]."""
        query = query.contiguous()
        key_value = key_value.contiguous()
        own_block, *levels = blocks
        key, value = take(key_value, own_block.keys, dim=1)
        output, lse = flash_forward(query, key, value, own_block, scale)
        if levels:
            merged = output.to(torch.promote_types(query.dtype, torch.float32))
            lse = lse.clone()  # the kernel's own may be kept, see `recomputation`
            for block in levels:
                attend(query, key_value, scale, block, merged, lse)
            output = merged.to(query.dtype)
        ctx.save_for_backward(query, key_value, output, lse)
        ctx.scale = scale
        ctx.blocks = blocks
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key_value, output, lse = ctx.saved_tensors
        inputs = grad_output.contiguous(), query, key_value, output, lse, ctx.scale
        dtype = torch.promote_types(query.dtype, torch.float32)
        own_block, *levels = ctx.blocks
        grad_query, part = gradients(*inputs, own_block)
        grad_query = grad_query.to(dtype if levels else query.dtype)
        grad_key_value = torch.zeros_like(key_value, dtype=dtype)
        add(grad_key_value, own_block.keys, part, dim=1)
        for block in levels:
            part_query, part = gradients(*inputs, block)
            add(grad_query, block.queries, part_query, dim=0)
            add(grad_key_value, block.keys, part, dim=1)
        return grad_query.to(query.dtype), grad_key_value.to(key_value.dtype), None, None
