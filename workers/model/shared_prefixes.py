"""Sequences that begin with the same tokens in one row, in which each shared token is computed once.

    p p p a a | p p p b b c | p p p b b d d      three sequences, 18 tokens
    p p p a a   b b c   d d                      the row, 10 cells: runs of tokens that no sequence before begins with
    0 1 2 3 4   3 4 5   5 6                      positions go on along the path

In the order of their tokens, the sequences that share a beginning are neighbours. Each adds a run: what it does not
share with the sequence before it. A run sees itself, causally, and on its path the beginnings of the runs that it
continues; runs that continue the same beginning, and those that continue these, follow one another in the row:

    level 0   every run                                      sees itself                      causal
    level 1   runs b b c, d d                                see p p p of the first run       full
    level 2   run d d                                        sees b b of the second run       full

A level is one call of a flash kernel, and levels are merged by their log-sum-exp (`merged_attention.py`). A hidden
state may predict several tokens: the last p predicts the first a, b and b.

Ranks that share a row deal its cells out one by one (striped attention: Brandon et al. 2023, arXiv:2311.09431), so that
each has as many cells of every run as the others, or one more, and as much attention:

    rank r of n, its cell i = cell i n + r of the row        sees causally, of the cells of rank k:
                                                             j <= i for k <= r,    j < i for k > r

Shapes: B sequences, T tokens of all sequences, W cells of the row; H query heads, K key-value heads, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from balancing.shared_prefixes import fewest_worth_sharing
from workers.model.flash_kernels import Segments, flash_forward
from workers.model.merged_attention import Block, add, attend, backward
from workers.model.packing import PackedRow, Sequences, place, with_work

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Consecutive cells of a row, from `first` on.

    depth: tokens of its sequence before it. It continues the first `shared` cells of run `parent`; -1 and 0 for a run
    that begins a sequence. level: the number of runs on its path.
    """

    first: int
    length: int
    depth: int
    parent: int
    shared: int
    level: int


@dataclass(frozen=True)
class SharedRow(PackedRow):
    """A packed row of runs; to the outside one segment (`lengths`, `padded_lengths`) with padding at its end.

    last: int64 [B], the cell of each sequence's last token.
    """

    runs: tuple[Run, ...]
    last: Tensor

    @property
    def shared(self) -> Sequence[int]:
        """Tokens at the beginnings of sequences that another sequence's cells compute."""
        return [run.depth for run in self.runs]

    @property
    def shares(self) -> bool:
        """Whether several sequences share a token."""
        return any(run.level for run in self.runs)

    def cells_of(self, context_parallel: int, context_rank: int) -> Tensor:
        """The cells that one context-parallel rank computes, int64 [W / cp]: every cp-th, see `Stripe`."""
        return torch.arange(context_rank, self.padded_lengths[0], context_parallel)


def pack_shared(sequences: Sequences, multiple: int = 1, minimum: int = 1) -> SharedRow:
    """The row of a micro-batch in which a shared token is one cell; padded at its end to a multiple of `multiple`.

    minimum: a beginning is shared if it is this many tokens longer than one that is shared already, and long enough to
    pay (`balancing.shared_prefixes.fewest_worth_sharing`).
    Raises DataError if `loss_mask` marks the first token of a sequence, which nothing predicts.
    """
    sequences = with_work(sequences)
    ids = [part.numpy() for part in sequences.tokens["input_ids"].cpu().split(sequences.lengths.tolist())]
    runs, cells = _runs(ids, minimum)
    used = sum(run.length for run in runs)
    width = -(-used // multiple) * multiple
    return SharedRow(
        **place(sequences, torch.from_numpy(np.concatenate(cells)), (1, width)),
        lengths=(used,),
        padded_lengths=(width,),
        cu_seqlens=torch.tensor([0, used], dtype=torch.int32),
        cu_seqlens_padded=torch.tensor([0, width], dtype=torch.int32),
        runs=tuple(runs),
        last=torch.tensor([places[-1] for places in cells]),
    )


def _runs(ids: Sequence[Integers], minimum: int) -> tuple[list[Run], list[Integers]]:
    """The runs of a row, and int64 [L], the cells of each of the sequences `ids`."""
    runs: list[Run] = []
    cells = [np.empty(0, np.int64)] * len(ids)
    path: list[tuple[int, int]] = []  # runs of the sequence before, and how many of its tokens come before each
    before, end = -1, 0
    for index in sorted(range(len(ids)), key=lambda each: ids[each].astype(">i8").tobytes()):
        # One token at least is its own: every run has a cell.
        depth = 0 if before < 0 else min(_shared_tokens(ids[before], ids[index]), len(ids[index]) - 1)
        while path and depth - path[-1][1] < max(minimum, fewest_worth_sharing(len(ids[index]) - depth)):
            depth = min(depth, path.pop()[1])
        parent, start = path[-1] if path else (-1, 0)
        length = len(ids[index]) - depth
        cells[index] = np.concatenate([cells[before][:depth], np.arange(end, end + length)])
        path.append((len(runs), depth))
        runs.append(Run(end, length, depth, parent, depth - start, len(path) - 1))
        before, end = index, end + length
    return runs, cells


def _shared_tokens(one: Integers, other: Integers) -> int:
    """The number of tokens with which both begin."""
    shortest = min(len(one), len(other))
    different = np.flatnonzero(one[:shortest] != other[:shortest])
    return int(different[0]) if len(different) else shortest


@dataclass(frozen=True)
class Stripe:
    """The cells of a row that rank `rank` of `size` holds: `rank`, `rank + size`, ..."""

    rank: int
    size: int

    def of(self, cells: range) -> range:
        """Which of the rank's cells, counted from 0, are among consecutive `cells` of the row."""
        return range(-((self.rank - cells.start) // self.size), -((self.rank - cells.stop) // self.size))


WHOLE = Stripe(0, 1)


class SharedAttention:
    """The attention of one row of runs, all of it on this rank; a `PackedAttention` that is causal only."""

    def __init__(self, row: SharedRow, device: torch.device) -> None:
        self._blocks = attention_blocks(row, WHOLE, WHOLE, device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [1, H, W, D], key and value [1, K, W, D] -> [1, W, H, D]."""
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return _SharedAttention.apply(query, torch.stack([key, value]), scale, self._blocks)[None]


def ring_blocks(row: SharedRow, rank: int, size: int, device: torch.device) -> list[tuple[Block, ...]]:
    """By step of a ring, the blocks of rank `rank` of `size`, when it holds the keys of rank `rank - step`."""
    stripes = [Stripe(each, size) for each in range(size)]
    return [attention_blocks(row, stripes[rank], stripes[rank - step], device) for step in range(size)]


def attention_blocks(row: SharedRow, queries: Stripe, keys: Stripe, device: torch.device) -> tuple[Block, ...]:
    """The blocks, level 0 first, in which cells of stripe `queries` see cells of stripe `keys`; none where none does.

    Positions are counted among the cells of a stripe. Both stripes are of one size.
    """
    runs = [range(run.first, run.first + run.length) for run in row.runs]
    padding = range(row.lengths[0], row.padded_lengths[0])
    cells = row.padded_lengths[0] // queries.size
    blocks = [_block([_causal(run, queries, keys) for run in (*runs, padding)], device, causal_over=cells)]
    for level in range(1, max(run.level for run in row.runs) + 1):
        seen = [(queries.of(seeing), keys.of(beginning)) for seeing, beginning in _level(row.runs, level)]
        blocks.append(_block(seen, device))
    return tuple(block for block in blocks if block)


def _causal(run: range, queries: Stripe, keys: Stripe) -> tuple[range, range]:
    """As many queries as keys of one run, of which each query sees the keys up to its own place among them.

    Left out are queries that see none of these keys, and keys that none of the queries sees: one at most of each.
    """
    own, seen, later = queries.of(run), keys.of(run), int(keys.rank > queries.rank)
    return range(seen.start + later, own.stop), range(seen.start, own.stop - later)


def _level(runs: Sequence[Run], level: int) -> list[tuple[range, range]]:
    """(cells that see, cells seen): runs that continue one beginning, and those that continue these, see it."""
    stops: dict[tuple[int, int], list[int]] = {}  # of each beginning: first cell of those who see it, and one beyond
    beginning = (-1, 0)
    for run in runs:
        if run.level == level:
            beginning = (run.parent, run.shared)
            stops.setdefault(beginning, [run.first, run.first])
        if run.level >= level:
            stops[beginning][1] = run.first + run.length
    return [
        (range(*seeing), range(runs[parent].first, runs[parent].first + shared))
        for (parent, shared), seeing in stops.items()
    ]


def _block(segments: Sequence[tuple[range, range]], device: torch.device, causal_over: int = 0) -> Block | None:
    """The block of these (queries, keys), but for those in which either is empty; None if that leaves none.

    causal_over: cells of a stripe, for a causal block; 0 for a full one.
    """
    queries = [seeing for seeing, seen in segments if seeing and seen]
    keys = [seen for seeing, seen in segments if seeing and seen]
    if not queries:
        return None
    is_whole = sum(map(len, queries)) == causal_over
    return Block(
        None if is_whole else _positions(queries, device),
        None if is_whole else _positions(keys, device),
        Segments.of(list(map(len, queries)), device),
        Segments.of(list(map(len, keys)), device),
        causal=causal_over > 0,
    )


def _positions(ranges: Sequence[range], device: torch.device) -> Tensor:
    """int64, range after range."""
    return torch.cat([torch.arange(part.start, part.stop) for part in ranges]).to(device)


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key_value: Tensor, scale: float, blocks: Sequence[Block]) -> Tensor:
        """query [W, H, D], key_value [2, W, K, D] -> [W, H, D]."""
        query, key_value = query.contiguous(), key_value.contiguous()
        own, *levels = blocks
        key, value = key_value.unbind()
        output, lse = flash_forward(query, key, value, own.query_segments, own.key_segments, own.causal, scale)
        output = output.to(torch.promote_types(query.dtype, torch.float32))
        for block in levels:
            attend(query, key_value, scale, block, output, lse)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key_value, output, lse)
        ctx.scale, ctx.blocks = scale, blocks
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key_value, output, lse = ctx.saved_tensors
        dtype = torch.promote_types(query.dtype, torch.float32)
        grad_query = torch.zeros_like(query, dtype=dtype)
        grad_key_value = torch.zeros_like(key_value, dtype=dtype)
        grad_output = grad_output.contiguous()
        for block in ctx.blocks:
            part = backward(grad_output, query, key_value, output, lse, ctx.scale, block, grad_query)
            add(grad_key_value, block.keys, part, dim=1)
        return grad_query.to(query.dtype), grad_key_value.to(key_value.dtype), None, None
