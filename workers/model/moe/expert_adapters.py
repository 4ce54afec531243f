"""Adapters of fused experts: an A and a B for each expert of a weight, as peft's `target_parameters`.

    weight [E, out, in]                             rows of expert e: W_e x + alpha / rank * B_e (A_e x)
    A [E, rank, in], B [E, out, rank]               beside the weight, shared and sharded by expert as it is
    peft: A [E rank, in], B [out, rank E]           of wrappers around the experts, one a weight

peft itself adds B A to the whole weight in every pass, which neither shards nor fits grouped products.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from workers.config.model import LoraConfig
from workers.errors import ConfigError
from workers.model.sharding.parallel import full_tensor
from workers.model.sharding.tensor_parallel import find_experts

ADAPTER = "default"  # peft's name for the only adapter of a model
ADAPTED = ("gate_up_proj", "down_proj")
"""Weights of experts that take an adapter, from peft's innermost wrapper outwards."""
SUFFIX = "_adapter"
"""Of the module beside a weight."""


class ExpertAdapter(nn.Module):
    """A and B of every expert of one weight."""

    def __init__(self, weight: Tensor, config: LoraConfig, *, transposed: bool) -> None:
        super().__init__()
        count, outputs, inputs = weight.shape
        if transposed:
            outputs, inputs = inputs, outputs
        self.transposed = transposed
        self.usual_scaling = config.alpha / (
            math.sqrt(config.rank) if config.rslora else config.rank
        )
        self.scaling = self.usual_scaling
        make = partial(torch.empty, dtype=weight.dtype, device=weight.device)
        self.lora_A = nn.ParameterDict(
            {ADAPTER: nn.Parameter(make(count, config.rank, inputs))}
        )
        self.lora_B = nn.ParameterDict(
            {ADAPTER: nn.Parameter(make(count, outputs, config.rank))}
        )
        nn.init.kaiming_uniform_(self.lora_A[ADAPTER].view(-1, inputs), a=math.sqrt(5))
        nn.init.zeros_(self.lora_B[ADAPTER])

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return this rank's A [experts, rank, in] and B [experts, out, rank]."""
        a = self.lora_A[ADAPTER]
        b = self.lora_B[ADAPTER]
        return _local(a), _local(b)

    def set_scale(self, _name: str, factor: float) -> None:
        """Multiply what the adapters add by `factor`, as peft's layers do."""
        self.scaling = factor * self.usual_scaling

    def merged(self, device: torch.device, weight: Tensor) -> Tensor:
        """Return this rank's part of the weight with the adapters, or the whole. Collective."""
        a = self.lora_A[ADAPTER].detach().to(device)
        b = self.lora_B[ADAPTER].detach().to(device)
        if not isinstance(weight, DTensor):
            return weight + self._product(a, b)
        if (
            weight.placements == a.placements == b.placements
            and weight.placements == _by_expert(weight)
        ):
            local = weight.to_local() + self._product(a.to_local(), b.to_local())
            return DTensor.from_local(
                local,
                weight.device_mesh,
                weight.placements,
                shape=weight.shape,
                stride=weight.stride(),
            )
        return full_tensor(weight) + self._product(full_tensor(a), full_tensor(b))

    def product(self) -> Tensor:
        """Return what an unsharded model's adapters add to the weight."""
        return self._product(self.lora_A[ADAPTER], self.lora_B[ADAPTER])

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        product = torch.bmm(b, a) * self.scaling
        return product.transpose(1, 2) if self.transposed else product

    def share(self, mesh: DeviceMesh) -> None:
        """Keep the adapters of this rank's experts, in place."""
        for factors in (self.lora_A, self.lora_B):
            shared = distribute_tensor(
                factors[ADAPTER].data, mesh, [Shard(0)], src_data_rank=None
            )
            factors[ADAPTER] = nn.Parameter(shared)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _by_expert(weight: DTensor) -> tuple[Any, ...]:
    """Return the weight's placements if all its cuts are between experts."""
    return tuple(
        placement for placement in weight.placements if getattr(placement, "dim", 0) == 0
    )


def add_expert_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Add adapters to the weights of experts that `target_parameters` names, in place. They may be on the
    meta device. Raises ConfigError if the model has no such weights.
    """
    names = [name.strip() for name in config.target_parameters.split(",") if name.strip()]
    known = [f"experts.{name}" for name in ADAPTED]
    key = f"model.lora.target_parameters={config.target_parameters}"
    for name in names:
        if name not in known:
            raise ConfigError(f"{key}: {name} is not known. Use {' or '.join(known)}.")
    layers = [
        experts for experts in find_experts(model) if getattr(experts, "has_gate", False)
    ]
    if names and not layers:
        raise ConfigError(
            f"{key}: {type(model).__name__} has no fused experts. Leave it out."
        )
    for experts in layers:
        for name in names:
            weight_name = name.rpartition(".")[2]
            weight = experts.get_parameter(weight_name)
            adapter = ExpertAdapter(weight, config, transposed=bool(experts.is_transposed))
            experts.add_module(weight_name + SUFFIX, adapter)
        if names:
            compute = partial(_compute_as_merged, experts, experts.forward)
            experts.forward = compute  # type: ignore[method-assign]


def _compute_as_merged(
    experts: nn.Module, forward: Callable[..., Tensor], *inputs: Any, **options: Any
) -> Tensor:
    """Call transformers' forward pass with merged weights, for comparisons. `GroupedExperts` has its own."""
    weights = {}
    for name in ADAPTED:
        adapter = adapter_of(experts, name)
        if adapter is not None:
            weights[name] = experts._parameters[name]
            experts._parameters[name] = weights[name] + adapter.product()  # type: ignore[assignment]
    try:
        return forward(*inputs, **options)
    finally:
        experts._parameters.update(weights)


def expert_adapters(model: nn.Module) -> dict[str, ExpertAdapter]:
    """Return adapters by the name of their weight."""
    modules = model.named_modules()
    return {
        name.removesuffix(SUFFIX): module
        for name, module in modules
        if isinstance(module, ExpertAdapter)
    }


def adapter_of(experts: nn.Module, weight_name: str) -> ExpertAdapter | None:
    """Return the adapter of a weight of `experts`, or None without one."""
    return getattr(experts, weight_name + SUFFIX, None)


def share_adapters(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Share the adapters of `experts` as their weights over the one dimension of `mesh`, in place."""
    for adapter in experts.children():
        if isinstance(adapter, ExpertAdapter):
            adapter.share(mesh)


def stored_expert_weights(
    model: nn.Module, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole A and B as peft names and shapes them, one at a time on `device`. Collective."""
    for name, adapter in expert_adapters(model).items():
        wrapper = _wrapper(model, name)
        a = full_tensor(adapter.lora_A[ADAPTER].detach().to(device))
        yield f"base_model.model.{wrapper}.lora_A.weight", a.flatten(0, 1)
        b = full_tensor(adapter.lora_B[ADAPTER].detach().to(device))
        yield f"base_model.model.{wrapper}.lora_B.weight", b.permute(1, 2, 0).flatten(1)


def take_stored_weights(
    model: nn.Module, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Give expert adapters their values in `weights`, in place, and return the other weights.

    Raises ValueError for a name that is missing, or another shape.
    """
    rest = dict(weights)
    for name, adapter in expert_adapters(model).items():
        wrapper = _wrapper(model, name)
        for part, parameter in (
            ("A", adapter.lora_A[ADAPTER]),
            ("B", adapter.lora_B[ADAPTER]),
        ):
            stored_name = f"base_model.model.{wrapper}.lora_{part}.weight"
            if stored_name not in rest:
                raise ValueError(f"{stored_name} is missing there")
            stored = rest.pop(stored_name)
            count, rows, columns = parameter.shape
            shape = (count * rows, columns) if part == "A" else (rows, columns * count)
            if stored.shape != shape:
                raise ValueError(
                    f"{stored_name} has the shape {tuple(stored.shape)} instead of {shape}"
                )
            values = (
                stored.view(parameter.shape)
                if part == "A"
                else stored.view(rows, columns, count).permute(2, 0, 1)
            )
            if not parameter.is_meta:
                parameter.data.copy_(values)
    return rest


def _wrapper(model: nn.Module, weight_name: str) -> str:
    """Return the name of peft's wrapper of a weight: of two, the first is inside of the other."""
    experts, _, name = weight_name.rpartition(".")
    both = all(
        adapter_of(model.get_submodule(experts), other) is not None for other in ADAPTED
    )
    return f"{experts}.base_layer" if both and name == ADAPTED[0] else experts
