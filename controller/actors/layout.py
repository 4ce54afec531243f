"""Layout: the resources that a run asks of Ray, as data. `--dry-run` prints it, `controller.actors.launch`
starts it.

    training pool    one bundle for each policy worker   policy i, reference i, critic i, ... share a bundle
    rollout pool     one bundle for each engine          with separate GPUs if rollout.placement is apart.
                                                          A range of engines begins with its minimum
                     none if colocated                   engine i shares the tp ranks from i*tp on
    other pools      one bundle for each engine of another role, with separate GPUs
    no pool                                                 reward workers, wherever there is room

The bundles of a pool are equal, so any bundle suits any rank. `placement` assigns them once Ray has put them
on nodes.
"""

import math
from dataclasses import dataclass, replace

from controller.config import Config, TrainingConfig
from controller.config.training import count_noun

Bundle = dict[str, float]


@dataclass(frozen=True)
class Pool:
    """Equal bundles that are reserved together. The roles in a pool share them rank by rank.

    groups: sizes of groups of consecutive ranks that should share a node, each a divisor of the next.
    engines,
    engine_ranks: the first engines * engine_ranks ranks share their GPUs with engines. An engine needs one
    node.
    """

    name: str
    bundles: tuple[Bundle, ...]
    strategy: str = "PACK"
    groups: tuple[int, ...] = ()
    engines: int = 0
    engine_ranks: int = 1


@dataclass(frozen=True)
class RoleRequest:
    """Actors of one role: each takes `cpus` and `gpus` of its bundle in `pool` (empty: of the cluster)."""

    role: str
    actors: int
    cpus: float
    gpus: float
    pool: str


def training_pool(config: TrainingConfig) -> Pool:
    """Return one bundle per policy worker, shared by other roles' equal ranks and colocated engines."""
    parallel, (engines, engine_ranks) = config.policy.parallel, config.colocated_engines
    # Every bundle has room for an engine's actor, because bundles must be equal.
    bundle = {
        "CPU": config.resources.cpus_per_worker
        * (len(config.training_roles) + (engines > 0))
    }
    tensor = parallel.tensor_parallel
    context = parallel.context_parallel
    expert = parallel.expert_parallel
    sharing = (
        tensor,
        tensor * context,
        *(math.lcm(tensor * context, expert),) * (expert > 1),
    )
    return Pool(
        "training",
        (bundle | ({"GPU": 1.0} if config.uses_gpus else {}),) * config.training_workers,
        groups=(
            *sharing,
            config.training_workers // (parallel.pipeline_parallel * parallel.replicate),
        ),
        engines=engines,
        engine_ranks=engine_ranks,
    )


def rollout_pool(config: TrainingConfig) -> Pool | None:
    if not isinstance(config, Config) or config.rollout_placement == "colocated":
        return None
    bundle = {"CPU": config.resources.cpus_per_worker}
    gpus = reserved_by_engine(config)
    return Pool("rollout", (bundle | ({"GPU": gpus} if gpus else {}),) * config.engines)


def reserved_by_engine(config: Config) -> float:
    """Return the GPUs that an engine reserves besides the policy's."""
    return (
        float(config.rollout.tensor_parallel)
        if config.rollout_placement == "apart"
        else 0.0
    )


def pools(config: TrainingConfig) -> list[Pool]:
    """Return everything that is reserved, training first because its groups need whole nodes."""
    training = training_pool(config) if config.training_roles else None
    other_pools = []
    for role, engine_config in (
        config.other_engines if isinstance(config, Config) else {}
    ).items():
        if pool := rollout_pool(engine_config):
            other_pools.append(replace(pool, name=role))
    return [
        pool for pool in (training, rollout_pool(config), *other_pools) if pool is not None
    ]


def role_requests(config: TrainingConfig) -> list[RoleRequest]:
    cpus = config.resources.cpus_per_worker
    workers = config.training_workers
    training_gpus = 1.0 / max(1, len(config.training_roles)) if config.uses_gpus else 0.0
    requests = [
        RoleRequest(role, workers, cpus, training_gpus, "training")
        for role in config.training_roles
    ]
    return requests + (
        _sampling_requests(config, cpus) if isinstance(config, Config) else []
    )


def _sampling_requests(config: Config, cpus: float) -> list[RoleRequest]:
    gpus = reserved_by_engine(config)
    pool = "training" if config.rollout_placement == "colocated" else "rollout"
    return [
        RoleRequest("rollout", config.engines, cpus, gpus, pool),
        *(
            RoleRequest(
                role, engine_config.engines, cpus, reserved_by_engine(engine_config), role
            )
            for role, engine_config in config.other_engines.items()
        ),
        RoleRequest("reward", config.reward_actors, cpus, 0.0, ""),
    ]


def sum_reserved(config: TrainingConfig, resource: str) -> float:
    in_pools = sum(
        bundle.get(resource, 0.0) for pool in pools(config) for bundle in pool.bundles
    )
    outside = [request for request in role_requests(config) if not request.pool]
    return in_pools + sum(
        r.actors * {"CPU": r.cpus, "GPU": r.gpus}[resource] for r in outside
    )


def idle_gpus(config: TrainingConfig, gpus: int) -> list[str]:
    """Warn of GPUs without work. gpus: of the cluster, 0 if unknown."""
    if not config.uses_gpus:
        return []
    (engines, engine_gpus), shared, used = (
        config.colocated_engines,
        config.training_workers,
        int(sum_reserved(config, "GPU")),
    )
    warnings = []
    if isinstance(config, Config):
        more_engines = config.engine_range.maximum - config.engines
        used = min(gpus, used + int(more_engines * reserved_by_engine(config)))
    if gpus > used:
        settings = (
            "policy.data_parallel or rollout.replicas"
            if config.samples
            else "policy.data_parallel"
        )
        warnings.append(
            f"{gpus - used} of {gpus} GPUs stay idle: the run takes {used}. Raise {settings}."
        )
    if engines and engines * engine_gpus < shared:
        warnings.append(
            f"{shared - engines * engine_gpus} of the policy's {shared} GPUs are idle while "
            f"{count_noun(engines, 'engine')} of {count_noun(engine_gpus, 'GPU')} generate. Set "
            f"rollout.replicas=0. rollout.tensor_parallel must divide {shared}."
        )
    return warnings
