"""Segments of a packed row for layers with a state, and the segments whose states they continue.

    p p p a a | p p p b b c | p p p b b d d      three sequences
    p p p a a   b b c   d d                      the row, its runs (`prefix_rows`)
    0 0 0 1 1   2 2 3   4 4                      segments: runs cut where others continue them
                                                 1 and 2 continue 0; 3 and 4 continue 2

Without shared prefixes, a segment is a sequence and continues none.

A batch holds segments longer than half its longest, in chunks of 64 tokens, the block of the references. So
less than half of a batch is padding, and the references, which walk from chunk to chunk, take fewer than
twice the steps of the longest segment. Padding comes after a segment, where no token of it looks. A batch
comes after those that hold the segments it continues.

Shapes: T tokens of the row, n segments of a batch with at most L tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from workers.model.attention.exchange import HeadExchange
from workers.model.copies import to_device
from workers.model.rows.packing import PackedRow
from workers.model.rows.prefix_rows import SharedRow

CHUNK = 64
NO_PARENT = -1


@dataclass(frozen=True)
class StateBatch:
    """tokens: int64 [n, L], T for padding. parents: the segments that the batch's continue, none at their
    start. hands_on: whether others continue the batch's.
    """

    segments: tuple[int, ...]
    parents: tuple[int, ...]
    tokens: Tensor
    hands_on: bool


class StateRow:
    """Lay out the segments of a row for functions along the sequence.

    exchange: between the ranks that share the row, of which each then has a part of every segment. parents:
    the segment that each continues, or NO_PARENT. Nothing for a row in which none do.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        exchange: HeadExchange | None = None,
        parents: Sequence[int] = (),
    ) -> None:
        self.lengths = tuple(lengths)
        self.exchange = exchange
        self.tokens = sum(self.lengths)
        self.parents = tuple(parents) or (NO_PARENT,) * len(self.lengths)
        self.shares = any(parent != NO_PARENT for parent in self.parents)
        self._device = device
        self._spread: dict[int, Tensor] = {}
        self._contexts: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(
        cls, row: PackedRow, device: torch.device, exchange: HeadExchange | None = None
    ) -> "StateRow":
        if not isinstance(row, SharedRow):
            return cls(row.padded_lengths, device, exchange)
        lengths, parents = cut_runs(row)
        return cls(lengths, device, exchange, parents)

    @cached_property
    def bounds(self) -> Tensor:
        return self._send(torch.tensor([0, *self.lengths]).cumsum(0))

    @cached_property
    def segment_of_token(self) -> Tensor:
        """Return the segment of each token, int32 [1, T]."""
        return self._send(self._segments().to(torch.int32)[None])

    def cells_between_zeros(self, zeros: int) -> Tensor:
        """Return the cell of each token in a row with so many zeros between its segments, int64 [T]."""
        if zeros not in self._spread:
            cells = torch.arange(self.tokens) + zeros * self._segments()
            self._spread[zeros] = self._send(cells)
        return self._spread[zeros]

    def tokens_before(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the last `count` tokens that each segment continues, and their cells in place of zeros."""
        if count not in self._contexts:
            tokens: list[int] = []
            cells: list[int] = []
            contexts: list[list[int]] = []
            for index, parent in enumerate(self.parents):
                context: list[int] = []
                if parent != NO_PARENT:
                    start = self._starts[parent]
                    path = contexts[parent] + list(
                        range(start, start + self.lengths[parent])
                    )
                    context = path[max(0, len(path) - count) :]
                contexts.append(context)
                first_cell = self._starts[index] + count * index
                tokens += context
                cells += range(first_cell - len(context), first_cell)
            sent = to_device(self._device, torch.tensor(tokens), torch.tensor(cells))
            self._contexts[count] = (sent[0], sent[1])
        return self._contexts[count]

    @cached_property
    def batches(self) -> list[StateBatch]:
        return self._batches_and_cells[0]

    @cached_property
    def cells(self) -> Tensor:
        """Return where each token of the row is among those of all batches, int64 [T]."""
        return self._batches_and_cells[1]

    @cached_property
    def _batches_and_cells(self) -> tuple[list[StateBatch], Tensor]:
        members = [
            batch
            for level in self._levels()
            for batch in like_segments(self.lengths, level)
        ]
        tokens = [self._tokens_of(segments) for segments in members]
        token_of_cell = torch.cat([batch.flatten() for batch in tokens])
        is_token = token_of_cell < self.tokens
        cells = torch.empty(self.tokens, dtype=torch.int64)
        cells[token_of_cell[is_token]] = is_token.nonzero().squeeze(1)
        *sent, cells = to_device(self._device, *tokens, cells)
        continued = set(self.parents)
        batches = []
        for segments, batch_tokens in zip(members, sent, strict=True):
            parents = [self.parents[index] for index in segments]
            batch = StateBatch(
                segments=tuple(segments),
                parents=tuple(parents) if NO_PARENT not in parents else (),
                tokens=batch_tokens,
                hands_on=not continued.isdisjoint(segments),
            )
            batches.append(batch)
        return batches, cells

    def _tokens_of(self, segments: Sequence[int]) -> Tensor:
        lengths = torch.tensor([self.lengths[index] for index in segments])[:, None]
        first = torch.tensor([self._starts[index] for index in segments])[:, None]
        offsets = torch.arange(int(lengths.max()))
        return torch.where(offsets < lengths, first + offsets, self.tokens)

    def _levels(self) -> list[list[int]]:
        """Return the segments that continue none, then those that continue these, and so on."""
        levels: list[list[int]] = []
        level_of: list[int] = []
        for index, parent in enumerate(self.parents):
            level = 0 if parent == NO_PARENT else level_of[parent] + 1
            if level == len(levels):
                levels.append([])
            levels[level].append(index)
            level_of.append(level)
        return levels

    @cached_property
    def _starts(self) -> list[int]:
        starts: list[int] = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        return starts

    def _segments(self) -> Tensor:
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))

    def _send(self, tensor: Tensor) -> Tensor:
        return to_device(self._device, tensor)[0]


def like_segments(lengths: Sequence[int], members: Sequence[int]) -> list[list[int]]:
    """Group segments into batches, see above."""
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(members, key=lambda index: -lengths[index]):
        chunks = -(-lengths[index] // CHUNK)
        if not batches or 2 * chunks <= longest:
            batches.append([])
            longest = chunks
        batches[-1].append(index)
    return batches


def cut_runs(row: SharedRow) -> tuple[list[int], list[int]]:
    """Return length and parent of each segment of a row, in its order. Padding is a segment."""
    lengths: list[int] = []
    parents: list[int] = []
    ending_at: dict[int, int] = {}  # the segment before each cell at which one ends
    ends_by_run: list[set[int]] = [{run.length} for run in row.runs]
    for run in row.runs:
        if run.level:
            ends_by_run[run.parent].add(run.shared)
    for run, ends in zip(row.runs, ends_by_run, strict=True):
        parent = (
            ending_at[row.runs[run.parent].first + run.shared] if run.level else NO_PARENT
        )
        start = 0
        for end in sorted(ends):
            lengths.append(end - start)
            parents.append(parent)
            parent = len(lengths) - 1
            ending_at[run.first + end] = parent
            start = end
    padding = row.padded_lengths[0] - row.lengths[0]
    if padding:
        lengths.append(padding)
        parents.append(NO_PARENT)
    return lengths, parents
