"""Activation offload: what gradient checkpointing keeps of each layer waits for the backward pass in host memory."""

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor


def activations_on_host() -> saved_tensors_hooks:
    """A context in which what autograd saves is copied to host memory (pinned, with CUDA), and back when it is needed.

    Meant for a decoder whose layers are checkpointed: these save nothing but their inputs, [T, hidden size] each.
    Without checkpointing it would also copy every weight, which FSDP frees and gathers by itself. Not torch's
    `save_on_cpu`, which cannot copy the DTensors that the final norm saves under tensor parallelism: they stay.
    """
    return saved_tensors_hooks(_to_host, _to_device)


def _to_host(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    if isinstance(tensor, DTensor):
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return tensor.device, host.copy_(tensor, non_blocking=tensor.is_cuda)


def _to_device(saved: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    device, host = saved
    return host.to(device, non_blocking=True)
