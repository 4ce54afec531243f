"""Exchanges between the ranks that share sequences: tokens of all heads for all tokens of some heads."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from workers.model.copies import to_device
from workers.model.rows.packing import PackedRow


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, blocks.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return AllToAll.apply(grad, ctx.group), None


class HeadExchange:
    """Exchange tensors of one row, cut as `PackedRow.cells_of`, with heads or channels h after the tokens.

    tensor_parallel: ranks, neighbours in `group`, that share each of these parts.
    Shapes: T tokens of the row, of which each of the `size` ranks has t.
    """

    def __init__(
        self,
        row: PackedRow,
        group: ProcessGroup,
        device: torch.device,
        tensor_parallel: int = 1,
    ) -> None:
        self._row = row
        self._group = group
        self._device = device
        self._tensor_parallel = tensor_parallel
        self.size = group.size()

    @cached_property
    def _orders(self) -> list[Tensor]:
        # A part of one rank of the context is cut further in order: together they are this part.
        context = self.size // self._tensor_parallel
        by_rank = torch.cat([self._row.cells_of(context, rank) for rank in range(context)])
        return to_device(self._device, by_rank, by_rank.argsort())

    def own_share(self, values: Tensor) -> Tensor:
        """Return this rank's part of values by head, [h, ...] -> [h/size, ...]."""
        return values.chunk(self.size)[self._group.rank()]

    def to_whole_sequences(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """[t, h, ...] each -> [T, h/size, ...] each, tokens in row order, in one exchange a dtype."""
        whole: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            chosen = [
                index for index, tensor in enumerate(tensors) if tensor.dtype == dtype
            ]
            whole |= self._exchange({index: tensors[index] for index in chosen})
        return [whole[index] for index in range(len(tensors))]

    def _exchange(self, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
        _, in_order = self._orders
        shares = [tensor.reshape(len(tensor), self.size, -1) for tensor in tensors.values()]
        received = AllToAll.apply(torch.cat(shares, dim=2).transpose(0, 1), self._group)
        joined = received.flatten(0, 1).index_select(0, in_order)
        parts = joined.split([share.shape[2] for share in shares], dim=1)
        return {
            index: part.reshape(len(part), tensor.shape[1] // self.size, *tensor.shape[2:])
            for (index, tensor), part in zip(tensors.items(), parts, strict=True)
        }

    def to_all_heads(self, output: Tensor) -> Tensor:
        """[T, h/size, ...] -> [t, h, ...]."""
        by_rank, _ = self._orders
        shares = output.index_select(0, by_rank).unflatten(0, (self.size, -1))
        return AllToAll.apply(shares, self._group).transpose(0, 1).flatten(1, 2)
