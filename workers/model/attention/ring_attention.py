"""Ring attention: keys and values pass from rank to rank, and every rank attends with its own queries.

    step 0       own keys, causal                 rank r holds segments r and 2n-1-r of every sequence
    step i       keys of rank s = r - i (mod n)   s < r: all queries see only the first half of the keys
                                                  s > r: the second half of the queries sees all keys
    every step   send keys and values to rank r + 1, receive the next, while this step's attention runs

So every rank does the same work at every step. If sequences share tokens, a rank holds every n-th cell, which
is also balanced (`prefix_rows.py`). Backward walks the ring again. The gradients of keys and values travel
with their keys.

Chunk length. Let the kernel reach F FLOP/s and a link carry B bytes/s in one direction, at 2 bytes an
element. With two segments of c tokens, a rank computes 2 (2c)^2 H D FLOPs in a forward step and sends 4 (2c)
K D bytes. Communication hides behind compute if c >= (K / H) F / B: 1,100 K/H tokens on NVLink (F = 5e14, B =
4.5e11), 10,000 K/H on a 400 Gb/s network card. Backward asks for 1.2 times more. Shorter sequences are exact
too, but wait for the exchange. `ulysses` sends less.

Shapes: T tokens on this rank (T/cp of the row), H query heads, K key-value heads (K divides H), D head
dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from workers.model.attention.exchange import HeadExchange
from workers.model.attention.flash_kernels import Block, Segments, add, attend, gradients
from workers.model.attention.shared_attention import ring_blocks
from workers.model.attention.state_rows import StateRow
from workers.model.copies import to_device
from workers.model.rows.packing import PackedRow
from workers.model.rows.prefix_rows import SharedRow


class RingAttention:
    def __init__(self, row: PackedRow, group: ProcessGroup, device: torch.device) -> None:
        self.states = StateRow.of(row, device, HeadExchange(row, group, device))
        place = (group.rank(), group.size(), device)
        blocks = (
            ring_blocks(row, *place)
            if isinstance(row, SharedRow)
            else _zigzag_blocks(row, *place)
        )
        self._ring = _Ring(group, blocks)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return _RingAttention.apply(query, torch.stack([key, value]), scale, self._ring)[
            None
        ]


def _zigzag_blocks(
    row: PackedRow, rank: int, size: int, device: torch.device
) -> list[tuple[Block, ...]]:
    # Of the two segments of each sequence.
    halves = [length // (2 * size) for length in row.padded_lengths]
    lengths = torch.tensor(halves).repeat_interleave(2)
    is_first = torch.tensor([True, False]).repeat(len(halves)).repeat_interleave(lengths)
    first, second = to_device(
        device, *(mask.nonzero().squeeze(1) for mask in (is_first, ~is_first))
    )
    half = Segments.of(halves, device)
    full_segments = Segments.of([2 * length for length in halves], device)
    own_block = Block(full_segments, full_segments, causal=True)
    earlier = Block(full_segments, half, causal=False, keys=first)
    later = Block(half, full_segments, causal=False, queries=second)
    return [(own_block,), *[(earlier,)] * rank, *[(later,)] * (size - 1 - rank)]


@dataclass(frozen=True)
class _Ring:
    group: ProcessGroup
    blocks: list[tuple[Block, ...]]

    @property
    def size(self) -> int:
        return self.group.size()

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Send `tensor` to the next rank. The returned function waits for the previous rank's."""
        rank = self.group.rank()
        received = torch.empty_like(tensor)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(
                    dist.isend, tensor, group=self.group, group_peer=(rank + 1) % self.size
                ),
                dist.P2POp(
                    dist.irecv,
                    received,
                    group=self.group,
                    group_peer=(rank - 1) % self.size,
                ),
            ]
        )

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return received

        return wait


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key_value: Tensor, scale: float, ring: _Ring
    ) -> Tensor:
        """query [T, H, D], key_value [2, T, K, D] -> [T, H, D]."""
        query = query.contiguous()
        key_value = key_value.contiguous()
        dtype = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros_like(query, dtype=dtype)
        lse = torch.full(
            (query.shape[1], query.shape[0]), -torch.inf, dtype=dtype, device=query.device
        )
        held = key_value
        for step in range(ring.size):
            wait = ring.pass_on(held) if step + 1 < ring.size else None
            for block in ring.blocks[step]:
                attend(query, held, scale, block, output, lse)
            held = wait() if wait else held
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key_value, output, lse)
        ctx.scale = scale
        ctx.ring = ring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key_value, output, lse = ctx.saved_tensors
        ring = ctx.ring
        grad_output = grad_output.contiguous()
        dtype = torch.promote_types(query.dtype, torch.float32)
        grad_query = torch.zeros_like(query, dtype=dtype)
        grad_held = torch.zeros_like(key_value, dtype=dtype)
        held = key_value
        wait_for_grad = None
        for step in range(ring.size):
            wait = ring.pass_on(held) if step + 1 < ring.size else None
            parts = []
            for block in ring.blocks[step]:
                part_query, part = gradients(
                    grad_output, query, held, output, lse, ctx.scale, block
                )
                add(grad_query, block.queries, part_query, dim=0)
                parts.append((block.keys, part))
            # The gradient of the current keys comes from the previous rank, which held them one step earlier.
            grad_held = wait_for_grad() if wait_for_grad else grad_held
            for keys, part in parts:
                add(grad_held, keys, part, dim=1)
            wait_for_grad = ring.pass_on(grad_held)
            held = wait() if wait else held
        grad_key_value = wait_for_grad() if wait_for_grad else grad_held
        return grad_query.to(query.dtype), grad_key_value.to(key_value.dtype), None, None
