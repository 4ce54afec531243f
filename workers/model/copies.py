"""Copies between host and device that neither waits for.

to_device    tensors of a micro-batch --one pinned buffer--> one transfer --> views on the device
CopyStream   host <--> device on a second stream, in parallel with computing: activations, optimiser
"""

from typing import Any

import torch
from torch import Tensor


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copy tensors of the host to `device` in one transfer. The host does not wait: their copy is pinned."""
    # Aligned without gaps.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize)
    parts = [tensors[index].contiguous().flatten().view(torch.uint8) for index in order]
    packed = torch.cat(parts)
    packed = (
        packed
        if device.type == "cpu"
        else packed.pin_memory().to(device, non_blocking=True)
    )
    by_index = dict(zip(order, packed.split([len(part) for part in parts]), strict=True))
    return [
        by_index[index].view(tensor.dtype).view(tensor.shape)
        for index, tensor in enumerate(tensors)
    ]


class CopyStream:
    """Copy on a second CUDA stream, in parallel with the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, source: Tensor, target: Tensor) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            if target.is_cuda:
                # An interrupted backward pass may drop it without a wait.
                target.record_stream(self._stream)
            return self._stream.record_event()

    def wait(self, copied: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(copied)

    def finish(self) -> None:
        """Let the host wait for all copies, before it reads what they wrote."""
        self._stream.synchronize()


class CopyAtOnce:
    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def wait(self, copied: None) -> None:
        pass

    def finish(self) -> None:
        pass


def copies_of(device: torch.device) -> CopyStream | CopyAtOnce:
    return CopyStream(device) if device.type == "cuda" else CopyAtOnce()
