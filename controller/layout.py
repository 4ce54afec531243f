"""Layout: what a run asks of Ray, as data. `--dry-run` prints it, `controller.roles` starts it; neither repeats it.

training pool    one bundle for each policy worker      policy i, reference i, critic i, ... share bundle i
rollout pool     one bundle for each engine             with GPUs of its own where rollout.placement is apart
                 none where it is colocated             engine i shares tp bundles of training, from i*tp on
no pool                                                 reward workers, wherever there is room
"""

from dataclasses import dataclass

from controller.config import Config

Bundle = dict[str, float]


@dataclass(frozen=True)
class Pool:
    """Bundles that are reserved together; the roles in a pool share them rank by rank."""

    name: str
    bundles: tuple[Bundle, ...]
    strategy: str = "PACK"


@dataclass(frozen=True)
class RoleRequest:
    """The actors of one role: each takes `cpus` and `gpus` of its bundle in `pool` (empty: of the cluster)."""

    role: str
    actors: int
    cpus: float
    gpus: float
    pool: str


def training_pool(config: Config) -> Pool:
    """One bundle for each policy worker; the other roles' of the same number, and colocated engines, share them."""
    cpus, tensor_parallel = config.resources.cpus_per_worker, config.rollout.tensor_parallel
    engines = config.rollout.replicas if config.rollout_placement == "colocated" else 0
    bundles = []
    for rank in range(config.training_workers):
        holds_engine = rank % tensor_parallel == 0 and rank // tensor_parallel < engines
        bundle = {"CPU": cpus * (len(config.training_roles) + holds_engine)}
        bundles.append(bundle | ({"GPU": 1.0} if config.uses_gpus else {}))
    return Pool("training", tuple(bundles))


def rollout_pool(config: Config) -> Pool | None:
    """One bundle for each engine; None where engines share the training pool's."""
    if config.rollout_placement == "colocated":
        return None
    bundle = {"CPU": config.resources.cpus_per_worker}
    if config.rollout_placement == "apart":
        bundle["GPU"] = float(config.rollout.tensor_parallel)
    return Pool("rollout", (bundle,) * config.rollout.replicas)


def pools(config: Config) -> list[Pool]:
    """Everything that is reserved."""
    return [pool for pool in (training_pool(config), rollout_pool(config)) if pool is not None]


def role_requests(config: Config) -> list[RoleRequest]:
    """Every role of the run, in the order of the picture above."""
    cpus, workers = config.resources.cpus_per_worker, config.training_workers
    training_gpus = 1.0 / len(config.training_roles) if config.uses_gpus else 0.0
    engine_gpus = float(config.rollout.tensor_parallel) if config.rollout_placement == "apart" else 0.0
    requests = [RoleRequest(role, workers, cpus, training_gpus, "training") for role in config.training_roles]
    engine_pool = "training" if config.rollout_placement == "colocated" else "rollout"
    requests.append(RoleRequest("rollout", config.rollout.replicas, cpus, engine_gpus, engine_pool))
    requests.append(RoleRequest("reward", config.reward.workers, cpus, 0.0, ""))
    return requests


def reserved(config: Config, resource: str) -> float:
    """How much of a Ray resource ("CPU", "GPU") all pools and the actors outside them take."""
    in_pools = sum(bundle.get(resource, 0.0) for pool in pools(config) for bundle in pool.bundles)
    outside = [request for request in role_requests(config) if not request.pool]
    return in_pools + sum(r.actors * {"CPU": r.cpus, "GPU": r.gpus}[resource] for r in outside)
