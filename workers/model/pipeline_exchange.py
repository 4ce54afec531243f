"""Hidden states to the next stage and their gradients back, without the computation waiting for what it sends.

    stage s --hidden states, in the order of its forward passes--> stage s + 1       group `forward`
            <--gradients, in the order of its backward passes-----                   group `backward`

NCCL computes all transfers of two ranks in one group in the order of their calls, whatever their direction: with one
group, two stages that send to each other would each wait for the other to receive. So each direction has its own; so
has, with virtual stages, what goes from the last stage on to the first: of two stages they are neighbours both ways.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from balancing.pipeline import Kind
from workers.model.parallel import Parallel


class Exchange:
    """Transfers of one rank with its place's ranks in the stages before and after; creating it is collective."""

    def __init__(self, parallel: Parallel) -> None:
        pipeline = parallel.pipeline
        self._index, self._stages = pipeline.get_local_rank(), pipeline.size()
        self._groups: dict[tuple[Kind, bool], dist.ProcessGroup] = {("forward", False): pipeline.get_group()}
        self._groups["backward", False] = _same_groups_again(parallel)
        if parallel.config.virtual_stages > 1:
            self._groups["forward", True] = _same_groups_again(parallel)
            self._groups["backward", True] = _same_groups_again(parallel)
        self._meet(parallel.mesh.device_type)
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, kind: Kind, tensor: Tensor) -> None:
        """Begin to send to the stage that takes the result of a pass of `kind`."""
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        tensor = tensor.contiguous()
        group, place = self._way(kind, 1)
        work = dist.isend(tensor, group=group, group_dst=place)
        self._leaving.append((work, tensor))

    def receive(self, kind: Kind, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> "Arrival":
        """Begin to receive what a pass of `kind` takes."""
        tensor = torch.empty(shape, dtype=dtype, device=device)
        group, place = self._way(kind, -1)
        work = dist.irecv(tensor, group=group, group_src=place)
        return Arrival(work, tensor)

    def finish(self) -> None:
        """Return when all that was sent has left."""
        while self._leaving:
            self._leaving.popleft()[0].wait()

    def _meet(self, device: str) -> None:
        """Connect all pairs, one after the other along each way: NCCL makes a pair's connection in its first transfer,
        for which both wait, and later transfers come in an order that may be a circle."""
        greeting = torch.zeros(1, device=device)
        for kind, wraps in self._groups:
            for steps, transfer in ((-1, dist.irecv), (1, dist.isend)):
                there = self._index + (steps if kind == "forward" else -steps)
                if wraps != (0 <= there < self._stages):
                    group, place = self._way(kind, steps)
                    names = {"group_dst": place} if steps > 0 else {"group_src": place}
                    work = transfer(greeting, group=group, **names)
                    assert work is not None
                    work.wait()

    def _way(self, kind: Kind, steps: int) -> tuple[dist.ProcessGroup, int]:
        """(group, stage) that is `steps` further on the way of a pass of `kind`."""
        there = self._index + (steps if kind == "forward" else -steps)
        return self._groups[kind, not 0 <= there < self._stages], there % self._stages


class Arrival:
    """A tensor that is being received."""

    def __init__(self, work: dist.Work, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self) -> Tensor:
        self._work.wait()
        return self._tensor


def _same_groups_again(parallel: Parallel) -> dist.ProcessGroup:
    """This rank's group of a second set over the same ranks as the mesh's dimension `pp`."""
    columns = parallel.mesh.mesh.flatten(1).T.tolist()  # of every place, its rank in each stage
    found = None
    for ranks in columns:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            found = group
    assert found is not None
    return found
