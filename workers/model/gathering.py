"""From the shards of a tensor to the whole of it, on every rank or on one.

    [shard of rank 0] [shard of rank 1] ... --gather, dimension by dimension of the mesh--> whole tensor on `keeper`

Only the keeper holds the whole; an all-gather would make every rank hold it. Where FSDP2 sharded a part that tensor
parallelism had sharded before, the mesh's dimensions are undone from left to right: FSDP's first.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


def gather_to(tensor: Tensor, keeper: int) -> Tensor | None:
    """The whole of `tensor` on the global rank `keeper`, None on the others; collective over all ranks.

    A tensor that is no DTensor is whole on every rank, and costs nothing.
    """
    if not isinstance(tensor, DTensor):
        return tensor if dist.get_rank() == keeper else None
    mesh = tensor.device_mesh
    here, there = mesh.get_coordinate(), _coordinate(mesh, keeper)
    if here is None or there is None:  # another group of ranks holds the same, the keeper among them
        return None
    part = tensor.to_local()
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate() and here[dimension] == there[dimension]:
            continue
        gathered = None if placement.is_replicate() else _undo(part, tensor, dimension, here, there[dimension])
        if gathered is None:
            return None
        part = gathered
    return part


def _undo(part: Tensor, tensor: DTensor, dimension: int, here: list[int], keeper: int) -> Tensor | None:
    """`part` as it was before it was sharded over a dimension of the mesh, on that dimension's rank `keeper`.

    Shards are as `torch.chunk` makes them: equal but the last ones, which are padded here for the sake of the gather.
    """
    mesh, sharded = tensor.device_mesh, _sharded_dimension(tensor.placements[dimension])
    ranks = mesh.size(dimension)
    rows = tensor.shape[sharded]
    for later in range(dimension + 1, mesh.ndim):
        placement = tensor.placements[later]
        if not placement.is_replicate() and _sharded_dimension(placement) == sharded:
            rows = _chunk(rows, mesh.size(later), here[later])
    largest = -(-rows // ranks)
    mine = part.movedim(sharded, 0)
    padded = mine.new_zeros(largest, *mine.shape[1:])
    padded[: len(mine)] = mine
    whole = padded.new_empty(ranks * largest, *mine.shape[1:]) if here[dimension] == keeper else None
    pieces = None if whole is None else list(whole.chunk(ranks))
    dist.gather(padded, pieces, group=mesh.get_group(dimension), group_dst=keeper)
    return None if whole is None else whole[:rows].movedim(0, sharded).contiguous()


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
