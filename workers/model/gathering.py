"""From the shards of tensors to the whole of them on one rank.

    [shards of rank 0] [shards of rank 1] ... --gather, dimension by dimension of the mesh--> whole tensors on `keeper`

Only the keeper holds the whole; an all-gather would make every rank hold it. Where FSDP2 sharded a part that tensor
parallelism had sharded before, the mesh's dimensions are undone from left to right: FSDP's first.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


def gather_to(tensors: Mapping[str, Tensor], keeper: int) -> dict[str, Tensor]:
    """The whole of each of `tensors` on the global rank `keeper`, nothing on the others; collective over all ranks.

    What ranks share alike travels together: a collective takes about as long for one small tensor as for many. A tensor
    that is no DTensor is whole on every rank, and costs nothing.
    """
    alike: dict[Any, dict[str, DTensor]] = defaultdict(dict)
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            replicated = tuple(placement.is_replicate() for placement in tensor.placements)
            alike[tensor.device_mesh, replicated, tensor.dtype][name] = tensor
        elif dist.get_rank() == keeper:
            whole[name] = tensor
    for (mesh, _, _), shards in alike.items():
        gathered = _gathered(list(shards.values()), mesh, keeper)
        whole |= zip(shards, gathered, strict=True) if gathered else {}
    return whole


def _gathered(tensors: list[DTensor], mesh: DeviceMesh, keeper: int) -> list[Tensor] | None:
    here, there = mesh.get_coordinate(), _coordinate(mesh, keeper)
    if here is None or there is None:  # another group of ranks holds the same, the keeper among them
        return None
    parts = [tensor.to_local() for tensor in tensors]
    for dimension, placement in enumerate(tensors[0].placements):
        if placement.is_replicate():
            if here[dimension] != there[dimension]:
                return None
            continue
        undone = _undo(parts, tensors, dimension, here, there[dimension])
        if undone is None:
            return None
        parts = undone
    return parts


def _undo(
    parts: list[Tensor], tensors: list[DTensor], dimension: int, here: list[int], keeper: int
) -> list[Tensor] | None:
    """`parts` as they were before they were sharded over a dimension of the mesh, on that dimension's rank `keeper`.

    Shards are as `torch.chunk` makes them: equal but the last ones, which are padded here for the sake of the gather.
    """
    mesh = tensors[0].device_mesh
    ranks = mesh.size(dimension)
    rows = [_rows(tensor, dimension, here) for tensor in tensors]
    padded = []
    for part, tensor, count in zip(parts, tensors, rows, strict=True):
        mine = part.movedim(_sharded_dimension(tensor.placements[dimension]), 0)
        padded.append(mine.new_zeros(-(-count // ranks), *mine.shape[1:]))
        padded[-1][: len(mine)] = mine
    sent = torch.cat([shard.flatten() for shard in padded])
    received = sent.new_empty(ranks, len(sent)) if here[dimension] == keeper else None
    pieces = None if received is None else list(received)
    dist.gather(sent, pieces, group=mesh.get_group(dimension), group_dst=keeper)
    if received is None:
        return None
    whole, columns = [], received.split([shard.numel() for shard in padded], dim=1)
    for shards, shard, tensor, count in zip(columns, padded, tensors, rows, strict=True):
        sharded = _sharded_dimension(tensor.placements[dimension])
        whole.append(shards.reshape(-1, *shard.shape[1:])[:count].movedim(0, sharded).contiguous())
    return whole


def _rows(tensor: DTensor, dimension: int, here: list[int]) -> int:
    """Rows, of its part here, that a dimension of the mesh shares."""
    mesh, sharded = tensor.device_mesh, _sharded_dimension(tensor.placements[dimension])
    rows = tensor.shape[sharded]
    for later in range(dimension + 1, mesh.ndim):
        placement = tensor.placements[later]
        if not placement.is_replicate() and _sharded_dimension(placement) == sharded:
            rows = _chunk(rows, mesh.size(later), here[later])
    return rows


def _chunk(rows: int, ranks: int, rank: int) -> int:
    """Rows of `rank`'s part when `rows` rows are sharded over `ranks`."""
    largest = -(-rows // ranks)
    return max(0, min(rows - rank * largest, largest))


def _sharded_dimension(placement: Placement) -> int:
    dimension: int = placement.dim  # type: ignore[attr-defined]  # of Shard, and of FSDP2's strided one
    return dimension


def _coordinate(mesh: DeviceMesh, rank: int) -> list[int] | None:
    places = torch.nonzero(mesh.mesh == rank)
    return places[0].tolist() if len(places) else None
