"""Layout: what a run asks of Ray, as data. `--dry-run` prints it, `controller.roles` starts it; neither repeats it.

training pool    one bundle for each policy rank        policy dp=i and reference dp=i share bundle i
rollout pool     one bundle for each engine             with GPUs of its own only where rollout.placement is apart
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
    """One bundle for each policy rank; the reference rank of the same number shares it."""
    roles = 2 if config.uses_reference else 1
    bundle = {"CPU": config.resources.cpus_per_worker * roles}
    if config.uses_gpus:
        bundle["GPU"] = 1.0
    return Pool("training", (bundle,) * config.policy.ranks)


def rollout_pool(config: Config) -> Pool:
    """One bundle for each engine, with its GPUs where it does not share the policy's."""
    bundle = {"CPU": config.resources.cpus_per_worker}
    if config.rollout_placement == "apart":
        bundle["GPU"] = float(config.rollout.tensor_parallel)
    return Pool("rollout", (bundle,) * config.rollout.replicas)


def role_requests(config: Config) -> list[RoleRequest]:
    """Every role of the run, in the order of the picture above."""
    cpus, ranks = config.resources.cpus_per_worker, config.policy.ranks
    training_gpus = (0.5 if config.uses_reference else 1.0) if config.uses_gpus else 0.0
    engine_gpus = float(config.rollout.tensor_parallel) if config.rollout_placement == "apart" else 0.0
    requests = [RoleRequest("policy", ranks, cpus, training_gpus, "training")]
    if config.uses_reference:
        requests.append(RoleRequest("reference", ranks, cpus, training_gpus, "training"))
    requests.append(RoleRequest("rollout", config.rollout.replicas, cpus, engine_gpus, "rollout"))
    requests.append(RoleRequest("reward", config.reward.workers, cpus, 0.0, ""))
    return requests
