"""Data parallelism by FSDP2: who holds which part of the parameters, and how gradients come together.

    fully_shard(layer) ... fully_shard(root)     parameters gathered layer by layer, forward and backward
    gradients --reduce-scatter, SUM--> shards --global norm--> clipped

Everything goes by the named dimensions of one DeviceMesh; today it has one, `dp`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor


def process_group_backend(device: torch.device) -> str:
    """Backend of the process group for `device`; with CUDA, gloo serves tensors that were offloaded to the CPU."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def data_parallel_mesh(device: torch.device) -> DeviceMesh:
    """The mesh of all ranks of the process group, with the one dimension `dp`.

    A process without a process group gets one of its own with a single rank, in memory, so that one process takes the
    same path as many.
    """
    if not dist.is_initialized():
        dist.init_process_group(process_group_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def shard_model(
    root: nn.Module,
    layers: list[nn.Module],
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
) -> None:
    """Shard the parameters of `root` over `mesh`, in place: each layer by itself, all else with the root.

    Parameters keep their type and are cast to `compute_dtype` when gathered; gradients are reduced in the parameters'
    type and summed, not averaged, since every loss is already divided by global denominators.
    """
    mixed_precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=next(root.parameters()).dtype)
    # On the CPU the parameters are in host memory as it is.
    offload = CPUOffloadPolicy() if cpu_offload and mesh.device_type != "cpu" else OffloadPolicy()
    reshard = reshard_after_forward and mesh.size() > 1
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed_precision, offload_policy=offload, reshard_after_forward=reshard)
    # The root's own parameters (embedding, norm, output layer) end the forward pass and begin the backward.
    fully_shard(root, mesh=mesh, mp_policy=mixed_precision, offload_policy=offload, reshard_after_forward=False)
    for module in fsdp_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def reshard(root: nn.Module) -> None:
    """Free gathered parameters, so that what is read next are the shards that the optimiser updates."""
    for module in fsdp_modules(root):
        module.reshard()


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients down to the global L2 norm `max_norm`; returns the norm before, the same on every rank."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = full_tensor(nn.utils.get_total_norm(gradients))
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor; a collective call if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
