"""Activation offload: inputs of checkpointed layers wait in host memory for the backward pass.

    forward    layer 0 | layer 1 | layer 2         computation
                  out 0     out 1     out 2        copies, on their own stream
    backward   layer 2 | layer 1 | layer 0
                  in 1      in 0                   fetched while the layer after it is recomputed

At most two tensors are on their way out: before a third, the computation waits for the first. torch's
`save_on_cpu` copies on the computation's stream, which waits for each copy, and cannot copy the DTensors that
the final norm saves under tensor parallelism. They stay on the device.
"""

from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from workers.model.copies import CopyAtOnce, CopyStream, copies_of

MOST_LEAVING = 2


@dataclass
class Saved:
    """Hold one tensor in host memory. back: (tensor on the device, argument of `wait`) while prefetched."""

    index: int
    host: Tensor
    device: torch.device
    back: tuple[Tensor, Any] | None = None


class HostActivations:
    """Keep the tensors that a forward pass saved until the backward pass loads them."""

    def __init__(self, copies: Any) -> None:
        self._copies = copies
        self._saved: list[Saved] = []
        self._leaving: deque[tuple[Tensor, Any]] = deque()

    def save(self, tensor: Tensor) -> Tensor | Saved:
        if isinstance(tensor, DTensor):
            return tensor
        if len(self._leaving) == MOST_LEAVING:
            self._let_go()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._leaving.append((tensor, self._copies.copy(tensor, host)))
        self._saved.append(Saved(len(self._saved), host, tensor.device))
        return self._saved[-1]

    def load(self, saved: Tensor | Saved) -> Tensor:
        """Return the tensor on its device, and prefetch the tensor saved before it, which backward needs
        next.
        """
        if isinstance(saved, Tensor):
            return saved
        while self._leaving:
            self._let_go()
        tensor, copied = self._fetch(saved)
        if saved.index:
            self._fetch(self._saved[saved.index - 1])
        self._copies.wait(copied)
        saved.back = None
        return tensor

    def _let_go(self) -> None:
        _, copied = self._leaving[0]
        self._copies.wait(copied)
        self._leaving.popleft()

    def _fetch(self, saved: Saved) -> tuple[Tensor, Any]:
        if saved.back is None:
            tensor = torch.empty(
                saved.host.shape, dtype=saved.host.dtype, device=saved.device
            )
            saved.back = tensor, self._copies.copy(saved.host, tensor)
        return saved.back


def activations_on_host(device: torch.device) -> saved_tensors_hooks:
    """Inside, move tensors that autograd saves to host memory (pinned, with CUDA), and back when needed.

    Only for checkpointed layers, which save their inputs, [T, hidden size] each: others save weights that
    FSDP gathers.
    """
    activations = HostActivations(_copies(device))
    return saved_tensors_hooks(activations.save, activations.load)


@cache
def _copies(device: torch.device) -> CopyStream | CopyAtOnce:
    return copies_of(device)
