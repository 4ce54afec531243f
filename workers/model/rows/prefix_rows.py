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

Their attention: `shared_attention.py`. A hidden state may predict several tokens: the last p predicts the first a, b
and b.

Ranks that share a row deal its cells out one by one (striped attention: Brandon et al. 2023, arXiv:2311.09431), so that
each has as many cells of every run as the others, or one more, and as much attention:

    rank r of n, its cell i = cell i n + r of the row        sees causally, of the cells of rank k:
                                                             j <= i for k <= r,    j < i for k > r

Shapes: B sequences, T tokens of all sequences, W cells of the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from balancing.prefixes import fewest_worth_sharing
from workers.dataproto import DataProto
from workers.model.rows.packing import PackedRow, place, with_work

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


def pack_shared(sequences: DataProto, multiple: int = 1, minimum: int = 1) -> SharedRow:
    """The row of a micro-batch in which a shared token is one cell; padded at its end to a multiple of `multiple`.

    minimum: of a beginning that is less than this many tokens longer than one that is shared already, or too little to
    pay (`balancing.prefixes.fewest_worth_sharing`), only the shorter one is shared.
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
        while path and path[-1][1] > depth:
            path.pop()
        if path and depth - path[-1][1] < max(minimum, fewest_worth_sharing(len(ids[index]) - depth)):
            depth = path.pop()[1]
        if depth < fewest_worth_sharing(len(ids[index]) - depth):
            depth, path = 0, []
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
