"""Expert parallelism: ranks that hold different tokens share the experts of every layer.

    [T, H] --router--> k experts a token --sort by expert, all-to-all--> tokens of this rank's experts
        --one grouped product a matrix (experts.py)--> outputs --all-to-all back--> [T k, H] --sum--> [T, H]

    8 ranks, ep 4, 8 experts:  rank        0    1    2    3    4    5    6    7
                               experts     01   23   45   67   01   23   45   67   groups are neighbours
                               shards of   experts: ranks 0, 4; 1, 5; ...     all else: ranks 0 to 7

With tensor parallelism the residual stream is split by tokens (`tensor_parallel.py`). A block of experts is
then shared between dp_shard x cp x tp ranks: its router over all of them, its experts over ep first. Mixers
of states are shared in the same way.

No token is dropped. An expert sees the tokens of its whole ep group, so its gradient is already the group's
sum. FSDP adds the gradients of the ranks with the same expert. Sharding is transformers' own, applied before
FSDP2. A layer sends 2 T k H (ep - 1) / ep elements forward and as many backward, and half of them again for
gradient checkpointing.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_expert_parallelism

from workers.errors import UnsupportedModelError
from workers.model.model import described
from workers.model.moe.expert_adapters import share_adapters
from workers.model.moe.experts import GroupedExperts
from workers.model.sharding.parallel import Parallel
from workers.model.sharding.tensor_parallel import find_experts, modules_of_own_tokens

DISPATCHED = {"ep_dispatch_experts", "grouped_gemm"}
"""transformers' names of the two parts of a plan: modules that exchange tokens, parameters that are cut by
expert.
"""


def share_experts(
    model: PreTrainedModel, parallel: Parallel, grouped: GroupedExperts
) -> dict[nn.Module, DeviceMesh]:
    """Give each rank of an ep group its part of a model's experts, and let `grouped` compute them, in place.
    Call it before `shard_model`.

    Returns modules, inner ones first, with their mesh for FSDP2: with expert parallelism the experts, with
    tensor parallelism also their blocks, and mixers. Raises UnsupportedModelError for a family whose experts
    transformers does not dispatch.
    """
    blocks = (
        modules_of_own_tokens(model.get_decoder()) if parallel.tensor.size() > 1 else []
    )
    around = dict.fromkeys(blocks, parallel.different_tokens) if blocks else {}
    return _divided(model, parallel, grouped) | around


def _divided(
    model: PreTrainedModel, parallel: Parallel, grouped: GroupedExperts
) -> dict[nn.Module, DeviceMesh]:
    modules = find_experts(model)
    if parallel.config.expert_parallel == 1:
        for module in modules:
            if getattr(module, "has_gate", False):  # others stay as they are
                grouped.compute(module)
        return {}
    if set(model.ep_plan.values()) != DISPATCHED:
        raise UnsupportedModelError(
            f"{described(model)} is not shared by policy.parallel.expert_parallel: transformers has no "
            "all-to-all for its experts. Set it to 1."
        )
    mesh = _expert_mesh(parallel)
    # transformers 5.21 or later wants whole names, no patterns.
    named = getattr(model, "_expand_parallel_plan", dict)
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], named(model.ep_plan))
    for module in modules:
        share_adapters(module, mesh["ep"])
        grouped.compute(module, mesh["ep"].get_group())
    sharding = (
        mesh["dp_replicate", "expert_shard"]
        if parallel.config.replicate > 1
        else mesh["expert_shard"]
    )
    return dict.fromkeys(modules, sharding)


def _expert_mesh(parallel: Parallel) -> DeviceMesh:
    """Return the mesh of all ranks with `expert_shard` and `ep` for `dp_shard`, `cp` and `tp` of
    `Parallel.mesh`.

    FSDP2 needs a parameter's meshes to be parts of one. Neighbours share experts: all-to-all stays in a node.
    """
    sizes = dict(zip(parallel.mesh.mesh_dim_names or (), parallel.mesh.shape, strict=True))
    ep = parallel.config.expert_parallel
    sharing = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    renamed = {
        "dp_shard": ("expert_shard", sharing // ep),
        "cp": ("ep", ep),
        "tp": ("tp", 1),
    }
    names, shape = zip(
        *(renamed.get(name, (name, size)) for name, size in sizes.items()), strict=True
    )
    return init_device_mesh(parallel.mesh.device_type, shape, mesh_dim_names=names)
