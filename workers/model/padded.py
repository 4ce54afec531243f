"""The padded layout: a row a sequence, for models and backends that cannot keep the segments of a packed row apart.

    sequences of 3, 5 and 2 tokens, multiple 4:   0 0 0 p p p p p
                                                  1 1 1 1 1 p p p
                                                  2 2 p p p p p p      (p is padding)

Padding is at the end of a row, where causal attention hides it from every real token, as the mask does.

Shapes: B sequences in R = max(B, 1) rows of W cells.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.packing import ModelInput, Sequences, place, round_up, sequence_cells, with_work


@dataclass(frozen=True)
class PaddedRows(ModelInput):
    """A micro-batch as rows padded to its longest sequence. attention_mask: int64 [R, W], 1 at real tokens."""

    attention_mask: Tensor


def pad(sequences: Sequences, multiple: int = 1) -> PaddedRows:
    """The padded rows of a micro-batch, on the CPU; W is the smallest multiple of `multiple` that holds its longest.

    Raises DataError if `loss_mask` marks the first token of a sequence, which nothing predicts.
    """
    sequences = with_work(sequences)
    rows, width = len(sequences), int(round_up(sequences.lengths.max(), multiple))
    cells = sequence_cells(sequences, torch.arange(rows) * width)
    mask = torch.zeros(rows, width, dtype=torch.int64)
    mask.view(-1)[cells] = 1
    return PaddedRows(**place(sequences, cells, (rows, width)), attention_mask=mask)
