"""Context parallelism: the ranks of a group share every sequence, and gather the predictions of the whole
row.

    PackedRow --cut--> a rank's part --model--> log_probs, entropy of it --gather_tokens--> of the row, [N]

    sequence of 6 tokens, cp = 2, padded to 8:   0 1 | 2 3 | 4 5 | p p  2 * cp equal segments
    cp rank 0 holds segments 0 and 3:            0 1 p p                rank r: segments r and 2 * cp - 1 - r,
    cp rank 1 holds segments 1 and 2:            2 3 4 5                so that causal work is the same on all

If sequences share tokens, the cells are assigned one by one instead, see `prefix_rows`.

Attention and states look at other tokens. Two methods exchange those of attention:

    ulysses   [H heads, T/cp tokens] --all-to-all--> [H/cp heads, T tokens] --any kernel--> all-to-all back
              (Jacobs et al. 2023, arXiv:2309.14509). A rank sends (2 + 2 K/H) T/cp H D (cp-1)/cp elements
              a layer, less with each rank more. Needs heads that divide by cp
    ring      keys and values pass from rank to rank, `ring_attention`, for any number of heads.
              Sends 2 T/cp K D (cp-1)

States go the way of ulysses, whatever the method: heads and channels do not know each other. The convolution
and the chunked rule exchange one after the other, `states`.

Every rank computes the loss of the whole row from the same predictions.

Shapes: T cells of the padded row, N predicted tokens, H query heads, K key-value heads (K divides H), D head
dimension.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from workers.model.attention.attention import PackedAttention
from workers.model.attention.exchange import HeadExchange
from workers.model.attention.state_rows import StateRow
from workers.model.copies import to_device
from workers.model.rows.packing import PackedRow


def cut(row: PackedRow, group: ProcessGroup, device: torch.device) -> PackedRow:
    positions = row.cells_of(group.size(), group.rank())
    place = torch.full((row.input_ids.shape[1],), -1)
    place[positions] = torch.arange(len(positions))
    predicting = place[row.predicting]
    mine = predicting >= 0
    (selected,) = to_device(device, mine.nonzero().squeeze(1))
    if row.image_cells is not None and row.image_source is not None:
        image_cells, order = place[row.image_cells].sort()
        order = order[image_cells >= 0]
        image_cells = image_cells[image_cells >= 0]
        row = replace(row, image_cells=image_cells, image_source=row.image_source[order])
    return replace(
        row,
        input_ids=row.input_ids[:, positions],
        position_ids=row.position_ids[..., positions],
        predicting=predicting[mine],
        targets=row.targets[mine],
        teacher={name: values[mine] for name, values in row.teacher.items()},
        cells=place[row.cells],
        source=row.source[positions],
        whole=lambda values: gather_tokens(values, selected, len(row.targets), group),
    )


def gather_tokens(
    values: Tensor, selected: Tensor, size: int, group: ProcessGroup
) -> Tensor:
    """Join the ranks' values [n, ...] at `selected` into [size, ...], the same on every rank of `group`.

    Together the ranks' `selected` are a permutation of 0 .. size - 1. Backward takes each rank's own part of
    the gradient without communication: a sum would count the same loss once a rank.
    """
    return _GatherTokens.apply(values, selected, size, group)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, selected: Tensor, size: int, group: ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(selected)
        full_values = values.new_zeros(size, *values.shape[1:])
        full_values[selected] = values
        dist.all_reduce(full_values, group=group)
        return full_values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (selected,) = ctx.saved_tensors
        return grad[selected], None, None, None


class Ulysses:
    def __init__(
        self,
        attention: PackedAttention,
        row: PackedRow,
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        self._attention = attention
        self._exchange = HeadExchange(row, group, device)
        self.states = StateRow.of(row, device, self._exchange)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        *,
        sinks: Tensor | None = None,
        **features: Any,
    ) -> Tensor:
        """query [1, H, T/cp, D], key and value [1, K, T/cp, D] -> [1, T/cp, H, D]."""
        repeats = math.lcm(key.shape[1], self._exchange.size) // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        if sinks is not None:
            features["sinks"] = self._exchange.own_share(sinks)
        by_token = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        whole = self._exchange.to_whole_sequences(by_token)
        sequences = [tensor.transpose(0, 1)[None] for tensor in whole]
        return self._exchange.to_all_heads(
            self._attention(*sequences, scale, **features)[0]
        )[None]
