"""Low-rank adapters (LoRA, Hu et al. 2021) by `peft`: the base model is frozen and only A and B are trained.

    y = W x + alpha / rank * B A x     A [rank, in], B [out, rank], B = 0 at first: the policy is the base

    load_model --add_adapters--> shard_model --> train A and B     peft's folder --load_adapters--> A and B
                       |--lower_base--> W rounded to 8 or 4 bits (`low_bit_linear.py`)
                                      |--without_adapters--> the reference: the same weights, no second model
                                      |--merged_shards--> W + alpha / rank * B A under W's name: vLLM, export
                                      |--adapter_files--> A and B of one of several policies, for vLLM

The adapters' input has no dropout: the trained policy must be the sampled policy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from workers.config.model import ALL_LINEAR, ROUNDED
from workers.config.roles import LoraConfig
from workers.errors import ConfigError, UnsupportedModelError
from workers.model.attention.selected_attention import find_indexers
from workers.model.checkpoint.checkpoint_weights import Shard
from workers.model.checkpoint.export import write_weights
from workers.model.checkpoint.stored_adapters import ADAPTER, is_adapter, load_adapters
from workers.model.low_bit_linear import LowBitLinear, check_width
from workers.model.model import described
from workers.model.moe.expert_adapters import (
    ExpertAdapter,
    add_expert_adapters,
    expert_adapters,
    stored_expert_weights,
)
from workers.model.pretrained import decoder_of
from workers.model.rules.model_rules import WITHOUT_LINEAR
from workers.model.sharding.parallel import full_tensor


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Add an adapter to each target module of `model`, in place, and freeze everything else. Call it before
    sharding.

    A starts as in peft (uniform, Kaiming), from one seed, the same on every rank and in every run, or A and B
    as in the folder `config.path`. Raises ConfigError if a target is not a linear module, and for a folder of
    other adapters.
    """
    import peft
    from peft.tuners.lora.layer import ParamWrapper

    names = _target_names(model, config.target_modules)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft takes fractions, too
        use_rslora=config.rslora,
        target_modules=names,
        base_model_name_or_path=model.name_or_path,
        exclude_modules=_outside_decoder(model, names) or None,
    )
    model.requires_grad_(False)
    base = next(model.parameters())
    training = {part: part.training for part in model.modules()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Adapters of a skeleton on the meta device have no memory.
        peft.inject_adapter_in_model(
            settings, model, adapter_name=ADAPTER, low_cpu_mem_usage=base.is_meta
        )
        add_expert_adapters(model, config)
    if config.target_parameters:
        names = config.target_parameters.split(",")
        model.peft_config[ADAPTER].target_parameters = sorted(
            name.strip() for name in names
        )
    for name, layer in _peft_layers(model).items():
        if isinstance(layer, ParamWrapper):
            raise ConfigError(
                f"model.lora.target_modules={config.target_modules} gives the fused experts {name} an "
                "adapter. Name modules of attention alone, as in q_proj,v_proj, and experts in "
                "model.lora.target_parameters."
            )
        layer.lora_A.to(base.dtype)
        layer.lora_B.to(base.dtype)
    if config.path:
        load_adapters(model, config)
    # peft sets new modules to training mode. Layers use that flag for checkpointing, so restore it.
    for part in model.modules():
        part.training = training.get(part, False)


def lower_base(model: PreTrainedModel, base_dtype: str, tensor_parallel: int) -> None:
    """Round the weights below adapters to `model.base_dtype`, in place, if that is `int8` or `nf4`. Call it
    before sharding.

    Raises ConfigError for a weight whose rows cannot be cut into blocks, or these be shared by the ranks.
    """
    if base_dtype not in ROUNDED:
        return
    for name, layer in _peft_layers(model).items():
        check_width(layer.base_layer, name, base_dtype, tensor_parallel)
        layer.base_layer = LowBitLinear(layer.base_layer, base_dtype)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, `model` computes exactly as the base model: the adapters' outputs are multiplied by 0."""
    # peft's switch would also make FSDP treat every parameter as frozen.
    layers = _adapted_layers(model)
    for layer in layers.values():
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers.values():
            layer.set_scale(ADAPTER, 1.0)


def merged_shards(model: PreTrainedModel, device: torch.device) -> dict[str, Shard]:
    """Return this rank's part of every weight under the base model's names, with its adapter merged on
    `device`.
    """
    # Parts of W and B hold the same rows, so a rank needs only the whole of A, which is small.
    layers = {f"{name}.base_layer": layer for name, layer in _peft_layers(model).items()}
    experts = expert_adapters(model)
    shards = {}
    for name, weight in model.state_dict().items():
        owner, _, part = name.rpartition(".")
        layer = layers.get(owner)
        module = owner.removesuffix(".base_layer")
        if is_adapter(name) or (layer and part == "scales"):
            continue
        if name in experts:
            shards[name] = Shard(weight, partial(_merged_experts, experts[name], weight))
        elif layer is None or part == "bias":
            shards[f"{module}.{part}" if module else part] = Shard.of(weight)
        else:
            shards[f"{module}.weight"] = Shard(_whole_like(layer), partial(_merged, layer))
    return shards


def adapter_weights(
    model: PreTrainedModel, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole A and B under peft's names, one at a time on `device`. Collective."""
    for name, weight in model.state_dict().items():
        if is_adapter(name) and not name.endswith(f".{ADAPTER}"):
            yield (
                f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}",
                full_tensor(weight.to(device)).detach(),
            )
    yield from stored_expert_weights(model, device)


def write_adapters(model: PreTrainedModel, weights: dict[str, Tensor], path: Path) -> None:
    """Write `adapter_weights` to the folder `path` for `peft.PeftModel.from_pretrained`."""
    write_weights(weights, path / "adapter_model.safetensors")
    settings: Any = model.peft_config[ADAPTER]
    settings.save_pretrained(str(path))


def adapter_files(
    model: PreTrainedModel, weights: dict[str, Tensor]
) -> dict[str, np.ndarray]:
    """Return the files of `write_adapters` by name, uint8 [bytes]."""
    with TemporaryDirectory() as folder:
        write_adapters(model, weights, Path(folder))
        return {file.name: np.fromfile(file, np.uint8) for file in Path(folder).iterdir()}


def _whole_like(layer: Any) -> Tensor:
    size = (layer.out_features, layer.in_features)
    return torch.empty(size, dtype=layer.lora_A[ADAPTER].weight.dtype, device="meta")


def _merged(layer: Any, device: torch.device) -> Tensor:
    weight = layer.base_layer.weight.detach().to(device)
    a, b = (
        part[ADAPTER].weight.detach().to(device) for part in (layer.lora_A, layer.lora_B)
    )
    if isinstance(a, DTensor):
        a = a.redistribute(placements=[Replicate()] * a.device_mesh.ndim)
    return weight + (b @ a) * layer.scaling[ADAPTER]


def _merged_experts(adapter: ExpertAdapter, weight: Tensor, device: torch.device) -> Tensor:
    return adapter.merged(device, weight.detach().to(device))


def modules_left_out(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the names of linear modules that `all-linear` gives no adapter, because peft cannot."""
    if config.target_modules != ALL_LINEAR:
        return []
    return sorted(name for name in _linear_names(model) if not _takes_adapter(model, name))


def _target_names(model: PreTrainedModel, setting: str) -> list[str]:
    linear_names = {name for name in _linear_names(model) if _takes_adapter(model, name)}
    if not linear_names:
        raise UnsupportedModelError(f"{described(model)} {WITHOUT_LINEAR}")
    if setting == ALL_LINEAR:
        # peft's default includes an MoE's router and fused experts.
        return sorted(linear_names)
    names = [name.strip() for name in setting.split(",")]
    for name in names:
        if name not in linear_names:
            raise ConfigError(
                f"model.lora.target_modules={setting}: {type(model).__name__} has no linear module {name!r} "
                f"that takes an adapter. It has {', '.join(sorted(linear_names))}."
            )
    return names


def _linear_names(model: PreTrainedModel) -> set[str]:
    # The output layer is applied by its weight alone, in chunks of tokens: an adapter on it would do nothing.
    head = model.get_output_embeddings()
    frozen = _frozen_modules(model)
    return {
        name.rpartition(".")[2]
        for name, module in decoder_of(model).named_modules()
        if isinstance(module, nn.Linear) and module is not head and id(module) not in frozen
    }


def _takes_adapter(model: PreTrainedModel, name: str) -> bool:
    """Return whether peft adapts the linear modules called `name`, and nothing else.

    It refuses those whose weight a Mamba kernel reads. In families with experts it takes `gate_proj` of a
    shared expert or a dense layer for the fused experts', here and when it reads the adapters.
    """
    import peft
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
    from peft.utils.transformers_weight_conversion import (
        convert_peft_config_for_transformers,
    )

    settings = peft.LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(settings, model, None)
        _check_lora_target_modules_mamba(settings, model, name)
    except ValueError:
        return False
    return name in (settings.target_modules or ())


def _outside_decoder(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Return the whole names of modules that end like a target and are outside the decoder, as a vision
    tower's, or without a gradient, as an indexer's.
    """
    inside = {id(module) for module in decoder_of(model).modules()} - _frozen_modules(model)
    every = model.named_modules()
    return [
        name
        for name, module in every
        if id(module) not in inside and name.rpartition(".")[2] in names
    ]


def _frozen_modules(model: PreTrainedModel) -> set[int]:
    return {id(module) for indexer in find_indexers(model) for module in indexer.modules()}


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    return _peft_layers(model) | expert_adapters(model)


def _peft_layers(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
