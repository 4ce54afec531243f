"""Activation offload: inputs of checkpointed layers wait for the backward pass in host memory.

    forward    layer 0 | layer 1 | layer 2         computation
                  out 0     out 1     out 2        copies, on a stream of their own
    backward   layer 2 | layer 1 | layer 0
                  in 1      in 0                   fetched while the layer after it is computed again

Two tensors at most are on their way out: before a third the computation waits for the first, so that memory stays
bounded where the bus is slower than the layers. Dropping a tensor only after that wait is what `record_stream` would do
too, but at a time that the host's pace decides. torch's own `save_on_cpu` copies on the computation's stream, which
waits for each copy, and cannot copy the DTensors that the final norm saves under tensor parallelism: they stay.
"""

from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

MOST_LEAVING = 2


class CopyStream:
    """Copies beside the computation of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def copy(self, source: Tensor, target: Tensor) -> Any:
        """Begin to copy after the work queued so far; returns the argument of `wait`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            if target.is_cuda:
                target.record_stream(self._stream)  # an interrupted backward pass may drop it without a wait
            return self._stream.record_event()

    def wait(self, copied: Any) -> None:
        """Order all further work of the computation after the copy."""
        torch.cuda.current_stream(self._device).wait_event(copied)


class CopyAtOnce:
    """The same without a second stream, on devices that have none."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def wait(self, copied: None) -> None:
        pass


@dataclass
class Saved:
    """One tensor in host memory. index: its place in the order of saving. back: (it on its device, the copy's mark)
    from when it is fetched until it is handed out."""

    index: int
    host: Tensor
    device: torch.device
    back: tuple[Tensor, Any] | None = None


class HostActivations:
    """Tensors that one forward pass saved, until its backward pass has loaded them."""

    def __init__(self, copies: Any) -> None:
        """copies: a `CopyStream`, or an object with its two methods."""
        self._copies = copies
        self._saved: list[Saved] = []
        self._leaving: deque[tuple[Tensor, Any]] = deque()

    def save(self, tensor: Tensor) -> Tensor | Saved:
        """Begin to copy a tensor out; autograd keeps the result in its place."""
        if isinstance(tensor, DTensor):
            return tensor
        if len(self._leaving) == MOST_LEAVING:
            self._let_go()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._leaving.append((tensor, self._copies.copy(tensor, host)))
        self._saved.append(Saved(len(self._saved), host, tensor.device))
        return self._saved[-1]

    def load(self, saved: Tensor | Saved) -> Tensor:
        """The tensor on its device. The tensor saved before it, which backward needs next, is prefetched."""
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
        """Drop the tensor that left first, once its copy is done."""
        _, copied = self._leaving[0]
        self._copies.wait(copied)
        self._leaving.popleft()

    def _fetch(self, saved: Saved) -> tuple[Tensor, Any]:
        if saved.back is None:
            tensor = torch.empty(saved.host.shape, dtype=saved.host.dtype, device=saved.device)
            saved.back = tensor, self._copies.copy(saved.host, tensor)
        return saved.back


def activations_on_host(device: torch.device) -> saved_tensors_hooks:
    """A context in which tensors saved by autograd go to host memory (pinned, with CUDA) and back when needed.

    Meant for one pass of a decoder whose layers are checkpointed: these save nothing but their inputs, [T, hidden size]
    each. Without checkpointing it would also copy every weight, which FSDP frees and gathers by itself.
    """
    activations = HostActivations(_copy_stream(device) if device.type == "cuda" else CopyAtOnce())
    return saved_tensors_hooks(activations.save, activations.load)


@cache
def _copy_stream(device: torch.device) -> CopyStream:
    """One for all passes."""
    return CopyStream(device)
