"""Tensor parallelism: the ranks of a group share every matrix. Between matrices each holds a part of the row.

    tokens [1, T] --embedding, vocabulary shared--> [1, T/tp, H]  residual stream and norms: own tokens
    [1, T/tp, H] --gather--> [1, T, H] --q, k, v: own heads-->    (sequence parallel, Korthikanti et al. 2022)
        attention of own heads --o--> reduce-scatter --> [1, T/tp, H]
    [1, T/tp, H] --gather--> gate, up: own columns --> down --> reduce-scatter --> [1, T/tp, H]
    [1, T/tp, H] --router, experts: own tokens, as on any other rank (expert_parallel.py)--> [1, T/tp, H]
    [1, T/tp, H] --mixer of a state: own tokens, exchanged for heads (states.py)--> [1, T/tp, H]
    final norm --gather--> [1, T, H] --output layer, vocabulary shared--> log-probs

Experts and mixers keep whole matrices, which FSDP2 shards over the ranks with different tokens. Mixers have
fused projections, of another order of rows in every family: cut by heads, each would need its own plan.

torch's `parallelize_module` shards before FSDP2, which shards each part again (Shoeybi et al. 2019). T must
divide by
tp: `balancing.basics.alignment.length_multiple`.
"""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from workers.model.attention.mixers import find_mixers
from workers.model.low_bit_linear import LowBitLinear

COLUMNS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3"}
ROWS = {"o_proj", "out_proj", "down_proj", "w2"}
NORMS = {"input_layernorm", "post_attention_layernorm", "operator_norm", "ffn_norm", "norm"}
NORMS_OF_HEADS = {"q_norm", "k_norm", "q_layernorm", "k_layernorm"}
FINAL_NORMS = {"norm", "norm_f", "embedding_norm"}
"""Names of modules in the layers, and after them, of the families that tensor parallelism takes."""


def find_experts(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if hasattr(module, "is_transposed") and hasattr(module, "num_experts")
    ]


def blocks_with_experts(model: nn.Module) -> list[nn.Module]:
    experts = {id(module) for module in find_experts(model)}
    return [
        module
        for module in model.modules()
        if not experts.isdisjoint(map(id, module.children()))
    ]


def modules_of_own_tokens(model: nn.Module) -> list[nn.Module]:
    """Return the modules with whole matrices, which see this rank's part of the residual stream."""
    return [*blocks_with_experts(model), *find_mixers(model)]


def own_cells(row: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the part of a row, [T] or [T, ...], whose tokens this rank's experts see. mesh: tensor
    parallelism's.
    """
    return row.chunk(mesh.size())[mesh.get_local_rank()]


def share_model(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard a model's parameters over the one dimension of `mesh`, in place. The model may be a skeleton.

    Afterwards the decoder returns its last hidden state as a DTensor. The output layer's weight is sharded
    over the vocabulary, tied or not. It is read, not called.
    """
    decoder = model.get_decoder()
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    tied = head.weight is embedding.weight
    names = {module: name for name, module in decoder.named_children()}
    plan: dict[str, ParallelStyle] = {
        names[embedding]: RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1)
        )
    }
    plan |= {name: SequenceParallel() for name in names.values() if name in FINAL_NORMS}
    _parallelize(decoder, mesh, plan)
    for layer in decoder.layers:
        _parallelize(layer, mesh, _layer_plan(layer))
    if tied:
        head.weight = embedding.weight
    else:
        _parallelize(model, mesh, {"lm_head": ColwiseParallel()})


def own_vocabulary(
    head: nn.Module,
) -> tuple[tuple[Tensor, Tensor | None], tuple[dist.ProcessGroup | None, int]]:
    """Return (weight, bias) of this rank's tokens, and (ranks that share the vocabulary, or None, the first's
    id).
    """
    weight = head.weight
    bias = head.bias
    if not isinstance(weight, DTensor):
        return (weight, bias), (None, 0)
    mesh = weight.device_mesh
    vocabulary = weight.shape[0]
    # On all ranks except the last ones, which get the rest.
    rows = -(-vocabulary // mesh.size())
    first = min(mesh.get_local_rank() * rows, vocabulary)
    return (weight.to_local(), None if bias is None else bias.to_local()), (
        mesh.get_group(),
        first,
    )


def _layer_plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    whole_modules = set(modules_of_own_tokens(layer))
    whole = tuple(
        f"{name}." for name, module in layer.named_modules() if module in whole_modules
    )
    plan: dict[str, ParallelStyle] = {}
    for name, module in layer.named_modules():
        if f"{name}.".startswith(whole):
            continue
        last = name.rpartition(".")[2]
        if hasattr(module, "lora_A") and last in COLUMNS | ROWS:
            plan |= {
                f"{name}.{part}": style
                for part, style in _adapted_styles(last, module).items()
            }
        elif style := _style(last, module):
            plan[name] = style
    return plan


class RowwiseCodes(RowwiseParallel):
    """Share a weight that is kept as codes and scales, by columns of the weight."""

    def _partition_linear_fn(
        self, name: str, module: nn.Module, device_mesh: DeviceMesh
    ) -> None:
        for part, parameter in list(module.named_parameters()):
            placement = Replicate() if part == "bias" else Shard(1)
            shared = distribute_tensor(
                parameter, device_mesh, [placement], src_data_rank=self.src_data_rank
            )
            module.register_parameter(part, nn.Parameter(shared, requires_grad=False))


def _adapted_styles(name: str, module: nn.Module) -> dict[str, ParallelStyle]:
    """Return the styles of a module's parts, by name, where it has an adapter.

    Between A and B are `rank` numbers a token: they travel where the module's input or output does, which
    is wider.
    """
    if name in COLUMNS:
        return {
            "base_layer": ColwiseParallel(),
            "lora_A.default": SequenceParallel(),
            "lora_B.default": ColwiseParallel(input_layouts=Shard(1)),
        }
    rowwise = (
        RowwiseCodes
        if isinstance(module.get_submodule("base_layer"), LowBitLinear)
        else RowwiseParallel
    )
    return {
        "base_layer": rowwise(output_layouts=Shard(1)),
        "lora_A.default": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "lora_B.default": SequenceParallel(use_local_output=True),
    }


def _style(name: str, module: nn.Module) -> ParallelStyle | None:
    if name in COLUMNS:
        return ColwiseParallel()
    if name in ROWS:
        return RowwiseParallel(output_layouts=Shard(1))
    if name in NORMS_OF_HEADS:
        return SequenceParallel(sequence_dim=2, use_local_output=True)
    if name in NORMS:
        return SequenceParallel(use_local_output=True)
    children = {child for child, _ in module.named_children()}
    if "q_proj" in children:
        return _gather_input("hidden_states")
    if children & ROWS:
        return PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
    return None


def _gather_input(name: str) -> PrepareModuleInput:
    return PrepareModuleInput(
        input_kwarg_layouts={name: Shard(1)},
        desired_input_kwarg_layouts={name: Replicate()},
    )


def _parallelize(
    module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]
) -> None:
    trained = {
        name: parameter.requires_grad for name, parameter in module.named_parameters()
    }
    # All ranks have the same weights, or none yet (meta device): each keeps its part without communication.
    parallelize_module(module, mesh, plan, src_data_rank=None)
    for (
        name,
        parameter,
    ) in module.named_parameters():  # SequenceParallel would train frozen norms
        parameter.requires_grad_(trained[name])
