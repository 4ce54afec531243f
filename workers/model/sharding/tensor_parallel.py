"""Tensor parallelism: the ranks of a group share every matrix. Between matrices each holds a part of the row.

    tokens [1, T] --embedding, vocabulary shared--> [1, T/tp, H]  residual stream and norms: own tokens
    [1, T/tp, H] --gather--> [1, T, H] --q, k, v: own heads-->    (sequence parallel, Korthikanti et al. 2022)
        attention of own heads --o--> reduce-scatter --> [1, T/tp, H]
    [1, T/tp, H] --gather--> gate, up: own columns --> down --> reduce-scatter --> [1, T/tp, H]
    [1, T/tp, H] --router, experts: own tokens, as on any other rank (expert_parallel.py)--> [1, T/tp, H]
    final norm --gather--> [1, T, H] --output layer, vocabulary shared--> log-probs

torch's `parallelize_module` shards before FSDP2, which shards each part again (Shoeybi et al. 2019). T must
divide by
tp: `balancing.basics.alignment.length_multiple`.
"""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel


def find_experts(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if hasattr(module, "is_transposed") and hasattr(module, "num_experts")
    ]


def blocks_with_experts(model: nn.Module) -> list[nn.Module]:
    experts = {id(module) for module in find_experts(model)}
    return [module for module in model.modules() if not experts.isdisjoint(map(id, module.children()))]


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
    blocks = blocks_with_experts(decoder)
    tied = head.weight is decoder.embed_tokens.weight
    _parallelize(
        decoder,
        mesh,
        {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
        },
    )
    for layer in decoder.layers:
        block_prefixes = {f"{name}." for name, module in layer.named_modules() if module in blocks}
        present = {
            name for name, _ in layer.named_modules() if not f"{name}.".startswith(tuple(block_prefixes))
        }
        _parallelize(layer, mesh, {name: style for name, style in _layer_plan().items() if name in present})
    if tied:
        head.weight = decoder.embed_tokens.weight
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
    rows = -(-vocabulary // mesh.size())  # on all ranks except the last ones, which get the rest
    first = min(mesh.get_local_rank() * rows, vocabulary)
    return (weight.to_local(), None if bias is None else bias.to_local()), (mesh.get_group(), first)


def _layer_plan() -> dict[str, ParallelStyle]:
    return {
        "input_layernorm": SequenceParallel(use_local_output=True),
        "self_attn": _gather_input("hidden_states"),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "self_attn.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(use_local_output=True),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }


def _gather_input(name: str) -> PrepareModuleInput:
    return PrepareModuleInput(
        input_kwarg_layouts={name: Shard(1)}, desired_input_kwarg_layouts={name: Replicate()}
    )


def _parallelize(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    # All ranks have the same weights, or none yet (meta device): each keeps its part without communication.
    parallelize_module(module, mesh, plan, src_data_rank=None)
