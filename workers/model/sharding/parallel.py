"""The device mesh of the ranks, FSDP2 sharding over it, and gradient clipping.

    rank = (((pp * DP_REPLICATE + dp_replicate) * DP_SHARD + dp_shard) * CP + cp) * TP + tp

    fully_shard(layer) ... fully_shard(root)     parameters gathered layer by layer, forward and backward
    gradients --reduce-scatter over dp_shard x cp, all-reduce over dp_replicate, SUM--> shards --> clipped

Ranks that differ only in pp, cp or tp hold the same sequences. The dp_replicate * dp_shard groups hold
different ones. Only the ranks of one stage shard the same parameters. Gradients are summed, not averaged:
every loss is already divided by denominators of the whole mini-batch, and a context-parallel rank returns the
gradient of its tokens.
"""

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from workers.config.roles import ParallelConfig
from workers.errors import ConfigError

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Parallel:
    """Hold the mesh of all ranks, by `DIMENSIONS`. sharding: the part for FSDP2, with `dp_replicate` first
    for HSDP.

    context_groups: by degree, the ranks that share this rank's sequences. token_groups: by degree, those and
    the ranks that share their layers: all have different tokens of the sequences.
    """

    mesh: DeviceMesh
    sharding: DeviceMesh
    config: ParallelConfig
    context_groups: Mapping[int, dist.ProcessGroup]
    token_groups: Mapping[int, dist.ProcessGroup]

    @property
    def context(self) -> DeviceMesh:
        return self.mesh["cp"]

    @property
    def context_rank(self) -> int:
        context: DeviceMesh = self.context
        return context.get_local_rank()

    @property
    def tensor(self) -> DeviceMesh:
        return self.mesh["tp"]

    @property
    def different_tokens(self) -> DeviceMesh:
        """Return the ranks of one copy of this rank's layers with different tokens of the residual stream."""
        return _over(self.mesh, ("dp_shard", "cp", "tp"))

    @property
    def pipeline(self) -> DeviceMesh:
        """Return the ranks with this rank's sequences that hold the other layers, by stage."""
        return self.mesh["pp"]

    @property
    def dp(self) -> int:
        """Return the number of groups with different sequences."""
        return self.mesh["dp_replicate"].size() * self.mesh["dp_shard"].size()

    @property
    def shares_by_step(self) -> bool:
        """Return whether each micro-step has its own context-parallel degree."""
        return self.config.context_parallel_degree == "auto"

    @property
    def counted_ranks(self) -> int:
        """Return the number of ranks whose metrics a caller merges."""
        return self.dp * (self.context.size() if self.shares_by_step else 1)

    @property
    def is_place_zero(self) -> bool:
        return dist.get_rank() % (dist.get_world_size() // self.pipeline.size()) == 0

    @property
    def leads_dp_group(self) -> bool:
        return all(
            mesh.get_local_rank() == 0
            for mesh in (self.pipeline, self.context, self.tensor)
        )


def process_group_backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def make_parallel(device: torch.device, config: ParallelConfig | None = None) -> Parallel:
    """Arrange all ranks of the process group on the mesh, or create an in-memory group of one rank.

    Raises ConfigError if `config` does not divide the ranks.
    """
    config = config or ParallelConfig()
    if not dist.is_initialized():
        dist.init_process_group(
            process_group_backend(device), store=dist.HashStore(), rank=0, world_size=1
        )
    shape = mesh_shape(dist.get_world_size(), config)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=DIMENSIONS)
    # A context-parallel group computes parts of the same sequences, yet holds different parameters.
    sharding = _over(
        mesh, ("dp_shard", "cp") if config.context_parallel > 1 else ("dp_shard",)
    )
    return Parallel(
        mesh, sharding, config, _context_groups(mesh, config), _token_groups(mesh, config)
    )


def limit_waits() -> None:
    """Give every process group the timeout of the whole world's, `resources.collective_timeout_s`.

    torch gives any other group half an hour. A mesh takes no timeout for groups of two backends
    ("cpu:gloo,cuda:nccl").
    """
    world = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    # A group that only stands for ranks has no waits.
    if not isinstance(world, dist.ProcessGroupGloo):
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.distributed_c10d._set_pg_timeout(world.options._timeout, group)


def _context_groups(
    mesh: DeviceMesh, config: ParallelConfig
) -> dict[int, dist.ProcessGroup]:
    """Make the process groups of all degrees: neighbours among the ranks that differ only in cp."""
    most = config.context_parallel
    groups = {most: mesh["cp"].get_group()}
    rows = mesh.mesh.movedim(DIMENSIONS.index("cp"), -1)
    for degree in config.context_degrees:
        if 1 < degree < most:
            groups[degree] = dist.new_subgroups_by_enumeration(
                rows.reshape(-1, degree).tolist()
            )[0]
    return groups


def _token_groups(mesh: DeviceMesh, config: ParallelConfig) -> dict[int, dist.ProcessGroup]:
    """Make the process groups of all degrees: neighbours among the ranks that differ in cp or tp."""
    tp = config.tensor_parallel
    if tp == 1:
        return {}
    groups = {1: mesh["tp"].get_group()}
    for degree in config.context_degrees:
        if degree > 1:
            ranks = mesh.mesh.reshape(-1, degree * tp).tolist()
            groups[degree] = dist.new_subgroups_by_enumeration(ranks)[0]
    return groups


def mesh_shape(ranks: int, config: ParallelConfig) -> tuple[int, int, int, int, int]:
    """Return sizes of `DIMENSIONS` for `ranks` ranks. Raises ConfigError if they do not divide."""
    sharing = config.context_parallel * config.tensor_parallel * config.pipeline_parallel
    dp, remainder = divmod(ranks, sharing)
    if remainder:
        staged = " * parallel.pipeline_parallel" * (config.pipeline_parallel > 1)
        raise ConfigError(
            f"{ranks} ranks are not a multiple of parallel.context_parallel * "
            f"parallel.tensor_parallel{staged} = {sharing}"
        )
    if dp % config.replicate:
        raise ConfigError(
            f"parallel.replicate={config.replicate} does not divide the {dp} data-parallel ranks"
        )
    sharing_experts = (
        dp // config.replicate * config.context_parallel * config.tensor_parallel
    )
    if sharing_experts % config.expert_parallel:
        raise ConfigError(
            f"parallel.expert_parallel={config.expert_parallel} does not divide dp / replicate * "
            f"context_parallel * tensor_parallel = {sharing_experts} ranks, which hold different tokens of "
            "one copy of the model"
        )
    return (
        config.pipeline_parallel,
        config.replicate,
        dp // config.replicate,
        config.context_parallel,
        config.tensor_parallel,
    )


def _over(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    joined = "_".join(names)
    if len(names) > 1:
        # No public function joins dimensions of a mesh. The pinned torch has this one, which tests run.
        mesh[names]._flatten(joined)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return (
            mesh["dp_replicate", joined]
            if mesh["dp_replicate"].size() > 1
            else mesh[joined]
        )


def shard_model(
    root: nn.Module,
    layers: list[nn.Module],
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
    experts: Mapping[nn.Module, DeviceMesh] | None = None,
    uncast: Sequence[nn.Module] = (),
    unsharded: set[nn.Parameter] | None = None,
) -> None:
    """Shard the parameters of `root` over `mesh` (`Parallel.sharding`), in place: each layer, then all else.

    experts: modules that ranks share already, with their mesh. uncast: more layers, whose inputs keep their
    dtype.
    unsharded: parameters that every rank keeps. Others keep their dtype and are cast to `compute_dtype` when
    gathered. Gradients are reduced in `reduce_dtype`, and summed.
    """
    mixed_precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype
    )
    # On the CPU the parameters are in host memory anyway.
    offload = (
        CPUOffloadPolicy() if cpu_offload and mesh.device_type != "cpu" else OffloadPolicy()
    )
    # A router may give its weights in float32. Inputs of experts are not cast, as inside a layer.
    own_inputs = replace(mixed_precision, cast_forward_inputs=False)
    for module, own_mesh in (experts or {}).items():
        fully_shard(
            module,
            mesh=own_mesh,
            mp_policy=own_inputs,
            offload_policy=offload,
            reshard_after_forward=reshard_after_forward,  # on one rank, this frees the casts
            shard_placement_fn=partial(_even_placement, ranks=own_mesh.size(-1)),
        )
    # On one GPU, this frees the casts of each layer. On one CPU they are copies, and memory is not scarce.
    reshard = reshard_after_forward and (mesh.size() > 1 or mesh.device_type != "cpu")
    for layer in (*layers, *uncast):
        policy = own_inputs if layer in uncast else mixed_precision
        fully_shard(
            layer,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=reshard,
        )
    # The root's parameters (embedding, norm, output layer) end the forward pass and begin the backward.
    of_root = {
        "mp_policy": mixed_precision,
        "offload_policy": offload,
        "reshard_after_forward": False,
    }
    fully_shard(root, mesh=mesh, ignored_params=unsharded, **of_root)
    for module in fsdp_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _even_placement(parameter: nn.Parameter, ranks: int) -> Shard:
    """Shard over a rank's experts if they divide, else over the next dimension, so that no rank is empty."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    second_divides = local.ndim > 1 and local.shape[1] % ranks == 0
    return Shard(1) if local.shape[0] % ranks and second_divides else Shard(0)


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def reshard(root: nn.Module) -> None:
    for module in fsdp_modules(root):
        module.reshard()


def prepare_backward(
    root: nn.Module,
    layers: Iterable[nn.Module],
    last: bool,
    *,
    reshard_after_forward: bool,
    config: ParallelConfig,
) -> None:
    """Set up the next backward pass, through `layers` and `root`'s other modules. last: of the mini-batch.

    By default every pass reduces its gradients to the shards: unreduced ones are whole, in float32. Copies of
    the model (HSDP) sum their shards only in the last pass. Without `reshard_after_forward` parameters stay
    gathered until then.
    """
    for module in [
        cast(FSDPModule, root),
        *(module for layer in layers for module in fsdp_modules(layer)),
    ]:
        if config.defer_gradient_reduction:
            module.set_requires_gradient_sync(last, recurse=False)
        else:
            module.set_requires_all_reduce(last, recurse=False)
        module.set_reshard_after_backward(last or reshard_after_forward, recurse=False)


def clip_gradients(
    parameters: list[nn.Parameter],
    max_norm: float,
    stages: dist.ProcessGroup | None = None,
    counted_elsewhere: Collection[nn.Parameter] = (),
) -> float:
    """Scale all gradients down to the global L2 norm `max_norm`. Returns the norm before, the same on every
    rank.

    stages: the ranks that hold the other layers, if any. counted_elsewhere: parameters that another stage
    counts.

    torch's norm refuses a mixture of meshes (FSDP and tp), so it is taken by mesh: |g| = sqrt(sum of
    |g_mesh|^2).
    """
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh[
                parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            ].append(parameter)
    uncounted = set(map(id, counted_elsewhere))
    norms = []
    for group in by_mesh.values():
        gradients = [
            parameter.grad for parameter in group if id(parameter) not in uncounted
        ]
        if gradients:
            norms.append(full_tensor(nn.utils.get_total_norm(gradients)))
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if stages is not None:
        squared = norm.square()
        dist.all_reduce(squared, group=stages)
        norm = squared.sqrt()
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return float(norm)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, collectively. Its gradient must be the same on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
