"""Finds a model's experts, and the tokens that meet them on a rank."""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


def find_experts(model: nn.Module) -> list[nn.Module]:
    """The modules that hold all experts of a layer in 3-D parameters, as transformers marks them."""
    return [module for module in model.modules() if hasattr(module, "is_transposed") and hasattr(module, "num_experts")]


def blocks_with_experts(model: nn.Module) -> list[nn.Module]:
    """The modules that hold a router and its experts."""
    experts = {id(module) for module in find_experts(model)}
    return [module for module in model.modules() if any(id(child) in experts for child in module.children())]


def own_cells(row: Tensor, mesh: DeviceMesh) -> Tensor:
    """The part of a row, [T] or [T, ...], whose tokens meet the experts on this rank. mesh: of tensor parallelism."""
    return row.chunk(mesh.size())[mesh.get_local_rank()]
