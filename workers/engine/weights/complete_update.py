"""Engine side of weight updates: vLLM's transfer engines, which refuse an update that omits a parameter.

    start  --> layers wait for weights, their old ones put aside
    chunks --> vLLM's own loading --> layers that are complete take the new weights
    finish --> left_out(model)? --> none: resume    some: ValueError that names them

vLLM by itself keeps the old weights of omitted parameters, with a warning in a log. Here are the engines of
`ipc`, `nccl` and `shared_memory`, which reads a safetensors file.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
from vllm.platforms import current_platform

from workers.engine.weights.left_groups import GroupWatch
from workers.engine.weights.weight_transfer import FROZEN_VISION, TRANSFER_TIMEOUT

OUTPUT_LAYER = "lm_head.weight"
STACKED_EXPERTS = ".mlp.experts."
SINKS = ".attention_sink_bias"


def find_missing(model: nn.Module, frozen: Sequence[str] = ()) -> list[str]:
    """Return parameters that an update has not brought, or only in part. Call it before vLLM finishes the
    update.

    frozen: modules that keep their weights. A module with two names (an MoE layer's router) counts once.
    Scales of a KV cache do not count.
    """
    missing = []
    for prefix, module in model.named_modules():
        if f"{prefix}.".startswith(tuple(f"{name}." for name in frozen)):
            continue
        info = get_layerwise_info(module)
        # Needs no weights, or is complete.
        if not info.can_load() or is_deferred_attention_layer(module):
            continue
        sizes = {
            name: get_tensor_load_numel(parameter)
            for name, parameter in module.named_parameters(recurse=False)
            if name not in SKIP_LOAD_TENSORS
        }
        loaded = {name for name, _ in info.loaded_weights}
        missing += [f"{prefix}.{name}" for name in sizes if name not in loaded]
        # Other layers may be padded beyond a checkpoint's size.
        plain = isinstance(
            getattr(module, "quant_method", None),
            (UnquantizedLinearMethod, UnquantizedFusedMoEMethod),
        )
        if plain and sizes.keys() <= loaded and info.load_numel < sum(sizes.values()):
            missing += [f"a part of {prefix}.{name}" for name in sizes]
    return sorted(missing)


def _take_kernels(model: nn.Module) -> list[tuple[Any, Any]]:
    """Remove the CPU kernels of fused experts, which arrange weights in memory only when they are built.

    vLLM builds a missing kernel, so the new weights are arranged too. Returns (method of a layer, kernel).
    """
    layers = model.modules() if current_platform.is_cpu() else ()
    methods: list[Any] = [
        layer.quant_method for layer in layers if hasattr(layer, "quant_method")
    ]
    kernels = [
        (method, method.moe_kernel)
        for method in methods
        if getattr(method, "moe_kernel", None)
    ]
    for method, _ in kernels:
        method.moe_kernel = None
    return kernels


def _name_loaders(model: nn.Module) -> None:
    """Give partial functions their function's name, for which vLLM's reload asks (norms of MiniMax M2)."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


@dataclass
class _Translated:
    """Stand for a model, and rename or drop weights before the model loads them."""

    model: Any
    translate: Callable[[Any, str, Tensor], Iterator[tuple[str, Tensor]]]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        parts = (
            part
            for name, weight in weights
            for part in self.translate(self.model, name, weight)
        )
        return self.model.load_weights(parts)


def _drop_tied(model: Any, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Drop `lm_head.weight`, which a model with tied output (Gemma 2) refuses."""
    if name != OUTPUT_LAYER:
        yield name, weight


def _gpt_oss(model: Any, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Adapt gpt-oss, whose stacked experts and sinks vLLM writes without the loaders that it reloads with.

    Its loaders take one expert at a time, as `...mlp.experts.NUMBER.NAME`. The sinks' loader exists but is
    not called.
    """
    layer, stacked, parameter = name.partition(STACKED_EXPERTS)
    if stacked:
        for expert, part in enumerate(weight):
            yield f"{layer}{STACKED_EXPERTS}{expert}.{parameter}", part
    elif name.endswith(".sinks"):
        sinks = model.get_parameter(name.replace(".self_attn.", ".attn."))
        heads = len(sinks)  # of this rank
        sinks.weight_loader(
            sinks, weight.narrow(0, get_tensor_model_parallel_rank() * heads, heads)
        )
    else:
        yield name, weight


def _mimo(model: Any, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Load the sinks of MiMo V2, which vLLM copies without a loader, so that a reload would lose them."""
    if name.endswith(SINKS):
        sinks = model.get_parameter(name)
        heads = len(sinks)  # of this rank
        load = getattr(sinks, "weight_loader", default_weight_loader)
        load(sinks, weight.narrow(0, get_tensor_model_parallel_rank() * heads, heads))
    else:
        yield name, weight


def _load_experts(
    layer: RoutedExperts, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[str]:
    """Load as `layer.load_weights`, but a projection of all experts in one call, stacked.

    vLLM's bookkeeping takes 0.1 to 0.2 ms a call, and 128 experts in 48 layers have 18,432 weights.
    """
    shards = {
        layer.ckpt_gate_proj_name: "w1",
        layer.ckpt_up_proj_name: "w3",
        layer.ckpt_down_proj_name: "w2",
    }
    by_shard: dict[str | None, dict[str, Tensor]] = {}
    for name, weight in weights:
        expert, _, projection = name.partition(".")
        shard = (
            shards.get(projection.removesuffix(".weight")) if expert.isdecimal() else None
        )
        by_shard.setdefault(shard, {})[name] = weight
        if shard and len(by_shard[shard]) == layer.global_num_experts:
            stacked = torch.stack(
                [tensor for _, tensor in sorted(by_shard.pop(shard).items(), key=_number)]
            )
            name = "w2_weight" if shard == "w2" else "w13_weight"
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, stacked, name, shard, 0, return_success=True)
            yield name
    # Also what a buffer holds in part.
    other_weights = [item for items in by_shard.values() for item in items.items()]
    yield from RoutedExperts.load_weights(layer, other_weights)


def _number(expert: tuple[str, Tensor]) -> int:
    return int(expert[0].partition(".")[0])


def _stack_experts(model: nn.Module) -> None:
    """Let layers load stacked experts, where the layer holds all of them and as they are sent."""
    for layer in model.modules():
        plain = isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod)
        if (
            plain
            and isinstance(layer, RoutedExperts)
            and layer.local_num_experts == layer.global_num_experts
        ):
            # vLLM asks loaders for their name.
            layer.load_weights = MethodType(_load_experts, layer)


def _as_it_loads(model: nn.Module) -> Any:
    if isinstance(model, GptOssForCausalLM):
        return _Translated(model, _gpt_oss)
    if any(name.endswith(SINKS) for name, _ in model.named_parameters()):
        return _Translated(model, _mimo)
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return (
        model
        if any(name.endswith(OUTPUT_LAYER) for name in names)
        else _Translated(model, _drop_tied)
    )


class CompleteUpdate(WeightTransferEngine[Any, Any]):
    """Mixed into vLLM's weight-transfer engines that reload layer by layer.

    at_once: whether one call brings all weights. That call then raises, and vLLM takes further updates.
    Otherwise `finish_weight_update` raises, after which vLLM takes none.
    """

    at_once: ClassVar[bool] = True
    model: Any
    vllm_config: Any

    def start_weight_update(self) -> None:
        _name_loaders(self.model)
        super().start_weight_update()
        self._kernels = _take_kernels(self.model)
        _stack_experts(self.model)

    def receive_weights(self, update_info: Any) -> None:
        """Load a chunk. Raises ValueError, naming missing weights, if an update in one call is incomplete."""
        model = self.model
        try:
            self.model = _as_it_loads(model)
            super().receive_weights(update_info)
            self.model = model
            if self.at_once:
                _refuse(self._left_out(model))
        except Exception:
            self.model = model
            self._put_in_place()
            raise

    def finish_weight_update(self) -> None:
        missing = self._left_out(self.model)
        self._put_in_place()
        _refuse(missing)

    def _left_out(self, model: nn.Module) -> list[str]:
        is_frozen = self.vllm_config.additional_config[FROZEN_VISION]
        return find_missing(
            model, getattr(model, "_tower_model_names", ()) if is_frozen else ()
        )

    def _put_in_place(self) -> None:
        super().finish_weight_update()
        for (
            method,
            kernel,
        ) in self._kernels:  # layers that got no weights have no new kernel
            method.moe_kernel = method.moe_kernel or kernel


def _refuse(missing: list[str]) -> None:
    if missing:
        raise ValueError(
            f"the update brought nothing for {missing}, which would keep their old values."
        )


class TimedNCCLWeightTransferEngine(NCCLWeightTransferEngine):
    """vLLM's, which leaves a broadcast when its actor says so, or after `TRANSFER_TIMEOUT` seconds.

    It can then join the next group.

    NCCL has no time-out here: a receiver would wait forever for a lost member of its group, and nothing but
    its own abort ends that.
    """

    _group = 0  # number of the present group, as its actor counts them

    def init_transfer_engine(self, init_info: Any) -> None:
        self.shutdown()  # leaves the group before
        self._group += 1
        super().init_transfer_engine(init_info)

    def receive_weights(self, update_info: Any) -> None:
        """Raises TimeoutError if the broadcast was left. The weights are then undefined."""
        timeout_s = self.vllm_config.additional_config[TRANSFER_TIMEOUT]
        with GroupWatch(self._group, timeout_s, self._abort) as watch:
            try:
                super().receive_weights(update_info)
            except Exception as error:
                # An abort leaves values in the buffers that are not weights.
                if watch.reason:
                    raise TimeoutError(watch.reason) from error
                raise
        if watch.reason:
            raise TimeoutError(watch.reason)

    def _abort(self) -> None:
        if self.model_update_group is not None:
            self.model_update_group.destroy()


class CompleteNCCLWeightTransferEngine(CompleteUpdate, TimedNCCLWeightTransferEngine):
    """All weights in one call, broadcast by policy rank zero."""


class CompleteIPCWeightTransferEngine(CompleteUpdate, IPCWeightTransferEngine):
    """A call for each buffer of weights."""

    at_once = False


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Empty: nothing to agree on beforehand."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """path: a safetensors file with every weight under its Hugging Face name."""

    path: str


class _FileEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Load whole models from a file, layer by layer: a bare `load_weights` cannot write vLLM's packed CPU
    weights.
    """

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class then calls torch.accelerator.synchronize(), which a machine without one refuses.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        self.model.load_weights(load_file(update_info.path).items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


class SharedMemoryWeightTransferEngine(CompleteUpdate, _FileEngine):
    """Load the whole model from one file, and refuse an incomplete one."""
