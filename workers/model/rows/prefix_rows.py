"""Rows in which sequences share their prefixes, so that each shared token is computed once.

    p p p a a | p p p b b c | p p p b b d d      three sequences, 18 tokens
    p p p a a   b b c   d d                      the row, 10 cells: runs of tokens after the shared prefix
    0 1 2 3 4   3 4 5   5 6                      positions continue along the path

Sorted by tokens, sequences with a common prefix are neighbours. Each adds a run: the tokens that it does not
share with the sequence before. A run sees itself, causally, and on its path the prefixes that it continues.
The direct and indirect continuations of a prefix are consecutive in the row:

    level 0   every run                                      sees itself                      causal
    level 1   runs b b c, d d                                see p p p of the first run       full
    level 2   run d d                                        sees b b of the second run       full

`shared_attention.py` computes their attention. A hidden state may predict several tokens: the last p predicts
the first a, b and b.

Ranks that share a row take its cells in turn (striped attention: Brandon et al. 2023, arXiv:2311.09431), so
that cells of every run, and attention, are balanced to one cell:

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

from balancing.prefixes.groups import fewest_worth_sharing
from workers.batch.dataproto import DataProto
from workers.batch.placed_images import keys
from workers.model.rows.packing import PackedRow, place, with_work

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Hold consecutive cells of a row, from `first` on, that continue the first `shared` cells of run
    `parent`, or -1 and 0.

    depth: tokens of its sequence before it. level: the number of runs on its path.
    """

    first: int
    length: int
    depth: int
    parent: int
    shared: int
    level: int


@dataclass(frozen=True, kw_only=True)
class SharedRow(PackedRow):
    runs: tuple[Run, ...]

    @property
    def shared(self) -> Sequence[int]:
        return [run.depth for run in self.runs]

    @property
    def shares(self) -> bool:
        return any(run.level for run in self.runs)

    def cells_of(self, context_parallel: int, context_rank: int) -> Tensor:
        return torch.arange(context_rank, self.padded_lengths[0], context_parallel)


def pack_shared(sequences: DataProto, multiple: int = 1, minimum: int = 1) -> SharedRow:
    """Return a micro-batch's row with one cell for each shared token, padded at its end to a multiple of
    `multiple`.

    minimum: a prefix is shared only if it is at least this many tokens longer than one already shared, and
    pays (`balancing.prefixes.groups.fewest_worth_sharing`). Raises as `pack` does.
    """
    sequences = with_work(sequences)
    ids = [
        part.numpy()
        for part in sequences.tokens["input_ids"].cpu().split(sequences.lengths.tolist())
    ]
    images = sequences.objects.get("images", [()] * len(ids))
    runs, cells = _runs([keys(*pair) for pair in zip(ids, images, strict=True)], minimum)
    used = sum(run.length for run in runs)
    width = -(-used // multiple) * multiple
    return SharedRow(
        **place(sequences, torch.from_numpy(np.concatenate(cells)), (1, width)),
        lengths=(used,),
        padded_lengths=(width,),
        runs=tuple(runs),
    )


def _runs(ids: Sequence[Integers], minimum: int) -> tuple[list[Run], list[Integers]]:
    runs: list[Run] = []
    cells = [np.empty(0, np.int64)] * len(ids)
    path: list[
        tuple[int, int]
    ] = []  # runs of the previous sequence, and the tokens before each
    previous = -1
    end = 0
    for index in sorted(range(len(ids)), key=lambda row: ids[row].astype(">i8").tobytes()):
        # At least one token is not shared: every run has a cell.
        depth = (
            0
            if previous < 0
            else min(_shared_tokens(ids[previous], ids[index]), len(ids[index]) - 1)
        )
        while path and path[-1][1] > depth:
            path.pop()
        if path and depth - path[-1][1] < max(
            minimum, fewest_worth_sharing(len(ids[index]) - depth)
        ):
            depth = path.pop()[1]
        if depth < fewest_worth_sharing(len(ids[index]) - depth):
            depth = 0
            path = []
        parent, start = path[-1] if path else (-1, 0)
        length = len(ids[index]) - depth
        cells[index] = np.concatenate(
            [cells[previous][:depth], np.arange(end, end + length)]
        )
        path.append((len(runs), depth))
        runs.append(Run(end, length, depth, parent, depth - start, len(path) - 1))
        previous = index
        end = end + length
    return runs, cells


def _shared_tokens(one: Integers, other: Integers) -> int:
    shortest = min(len(one), len(other))
    different = np.flatnonzero(one[:shortest] != other[:shortest])
    return int(different[0]) if len(different) else shortest


@dataclass(frozen=True)
class Stripe:
    """Hold the cells of a row on rank `rank` of `size`: `rank`, `rank + size`, ..."""

    rank: int
    size: int

    def of(self, cells: range) -> range:
        return range(
            -((self.rank - cells.start) // self.size),
            -((self.rank - cells.stop) // self.size),
        )
