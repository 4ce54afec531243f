"""Check whether a run fits on a described cluster, by its requests to Ray, or on this machine.

    --cluster nodes=8,gpus=8,gpu_gib=80,cpus=96 --> Cluster
    Cluster --place--> Placement of every bundle --> fits, or why not

Each bundle takes the first node with room, and ranks take bundles as in a run (`actors.placement`). Ray may
begin with another node.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from balancing.errors import OptionError
from balancing.time_model import machine_named
from controller.actors.layout import (
    Bundle,
    Pool,
    pools,
    role_requests,
    rollout_pool,
    sum_reserved,
)
from controller.actors.placement import bundle_of_rank, groups_on_several_nodes
from controller.config import Config, TrainingConfig
from controller.config.conditions import leave_out_cpu_settings
from controller.config.training import has_amd_gpus
from controller.observability.shown_text import shorten
from workers.engine.placement import ranks_of_engine
from workers.errors import ConfigError, ResourceError

FORM = "nodes=8,gpus=8,gpu=H100,cpus=96,memory_gib=1024"
CPUS_OF_GPU = 12
LARGEST_NODES = 100_000  # placing every rank of more nodes takes minutes
LARGEST_FIGURE = 1e6
FIGURES = ("gpu_gib", "tflops", "bandwidth", "link", "network")


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. gpus, cpus, memory_gib: of one node, memory_gib 0 if unknown. gpu_gib: of one GPU.

    gpu: its name in `balancing.time_model`, empty if unknown. Others: its figures if they differ, see
    `Machine`.
    """

    nodes: int
    cpus: float
    gpus: int = 0
    gpu_gib: float = 0.0
    memory_gib: float = 0.0
    gpu: str = ""
    tflops: float = 0.0
    bandwidth: float = 0.0
    link: float = 0.0
    network: float = 0.0


@dataclass(frozen=True)
class Placement:
    """Nodes by rank. pools: ranks of each pool. rewards: reward workers. further_engines: engines that a
    range adds, as far as they have room.
    """

    pools: dict[str, tuple[int, ...]]
    rewards: tuple[int, ...]
    further_engines: tuple[int, ...] = ()


def parse_cluster(text: str) -> Cluster:
    """Parse `nodes=8,gpus=8,gpu=H100,cpus=96`. A known GPU has its memory, and CPUS_OF_GPU CPUs if none are
    given.

    Raises ConfigError for other forms.
    """
    numbers: dict[str, Any] = {}
    for part in text.split(","):
        match = re.fullmatch(
            rf"\s*(nodes|gpus|cpus|memory_gib|{'|'.join(FIGURES)})=(\d+(?:\.\d+)?)\s*", part
        )
        if match is None and (named := re.fullmatch(r"\s*gpu=(\w+)\s*", part)):
            _set_once(numbers, "gpu", named.group(1))
            continue
        if match is None:
            names = ", ".join(("nodes", "gpus", "gpu", "cpus", "memory_gib", *FIGURES))
            raise ConfigError(
                f"--cluster: {shorten(part, 40)!r} is none of {names}. Write {FORM}."
            )
        number = float(match.group(2))
        if number > LARGEST_FIGURE or (not number and match.group(1) in FIGURES):
            raise ConfigError(
                f"--cluster: {shorten(part, 40)}: must be above 0 and at most {LARGEST_FIGURE:,.0f}."
            )
        _set_once(numbers, match.group(1), int(number) if number.is_integer() else number)
    if name := numbers.get("gpu"):
        numbers = {
            "gpu_gib": _gib_of(name),
            "cpus": CPUS_OF_GPU * numbers.get("gpus", 0),
        } | numbers
    needed = ("nodes", "cpus", *(["gpu_gib"] if numbers.get("gpus") else []))
    missing = [name for name in needed if not numbers.get(name)]
    if missing or any(isinstance(numbers.get(name), float) for name in ("nodes", "gpus")):
        raise ConfigError(
            f"--cluster {text}: {', '.join(missing) or 'a count'} must be above 0 and whole. Write {FORM}."
        )
    if numbers["nodes"] * max(1, numbers.get("gpus", 0)) > LARGEST_NODES:
        raise ConfigError(
            f"--cluster: {shorten(text, 60)}: more than {LARGEST_NODES:,} GPUs or nodes. Give fewer."
        )
    return Cluster(**numbers)


def _set_once(numbers: dict[str, Any], name: str, value: Any) -> None:
    if name in numbers:
        raise ConfigError(f"--cluster: {name} is given twice. Give it once.")
    numbers[name] = value


def _gib_of(gpu: str) -> float:
    try:
        return machine_named(gpu).gib
    except OptionError as error:
        raise ConfigError(f"--cluster: {error}") from None


def run_on(config: Config, cluster: Cluster) -> None:
    """Expect devices, models and data on the cluster, and leave out settings of CPUs on GPUs."""
    config.is_described = True
    config.described_gpus = cluster.nodes * cluster.gpus
    if config.resources.device == "auto":
        config.resources.device = "cuda" if cluster.gpus else "cpu"
    leave_out_cpu_settings(config)


def place(config: Config, cluster: Cluster) -> Placement:
    """Find the node of every rank. Raises ConfigError, naming the missing resource, if the run
    does not fit.
    """
    free = [{"CPU": cluster.cpus, "GPU": float(cluster.gpus)} for _ in range(cluster.nodes)]
    placed = {}
    for pool in pools(config):
        nodes = [
            _take(free, b, f"bundle {i} of pool {pool.name}", cluster)
            for i, b in enumerate(pool.bundles)
        ]
        placed[pool.name] = tuple(nodes[bundle] for bundle in _bundle_of_rank(pool, nodes))
    reward = next(request for request in role_requests(config) if not request.pool)
    rewards = tuple(
        _take(free, {"CPU": reward.cpus}, f"reward worker {i}", cluster)
        for i in range(reward.actors)
    )
    return Placement(placed, rewards, tuple(_further_engines(config, free, cluster)))


def _further_engines(config: Config, free: list[Bundle], cluster: Cluster) -> Iterator[int]:
    """Take room for engines of a range above its minimum, and yield their nodes."""
    pool = rollout_pool(config)
    engines = config.engine_range
    if pool is None or not engines.is_elastic:
        return
    with suppress(ConfigError):
        for replica in range(engines.minimum, engines.maximum):
            yield _take(free, pool.bundles[0], f"engine {replica}", cluster)


def _take(free: list[Bundle], bundle: Bundle, purpose: str, cluster: Cluster) -> int:
    for node, room in enumerate(free):
        if all(room[resource] + 1e-9 >= amount for resource, amount in bundle.items()):
            for resource, amount in bundle.items():
                room[resource] -= amount
            return node
    request = " and ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())
    raise ConfigError(
        f"the run does not fit on {cluster_in_words(cluster)}: no node has {request} left for {purpose}. "
        "Describe more nodes, or lower policy.data_parallel, rollout.replicas, rollout.tensor_parallel or "
        "resources.cpus_per_worker."
    )


def _bundle_of_rank(pool: Pool, nodes: list[int]) -> tuple[int, ...]:
    try:
        return bundle_of_rank(pool, nodes)
    except ResourceError as error:
        raise ConfigError(str(error)) from None


def cluster_in_words(cluster: Cluster) -> str:
    gpus = f"{cluster.gpus} GPUs of {cluster.gpu_gib:g} GiB and " if cluster.gpus else ""
    return (
        f"{cluster.nodes} {'node' if cluster.nodes == 1 else 'nodes'} with "
        f"{gpus}{cluster.cpus:g} CPUs each"
    )


def roles_on_node(config: Config, placement: Placement, node: int) -> dict[str, list[int]]:
    """Number the actors of each role on a node. A colocated engine counts at its first GPU."""
    by_role: dict[str, list[int]] = {}
    for request in role_requests(config):
        nodes = placement.pools[request.pool] if request.pool else placement.rewards
        step = (
            config.rollout.tensor_parallel if _shares_training(config, request.role) else 1
        )
        by_role[request.role] = [
            i for i in range(request.actors) if nodes[ranks_of_engine(i, step)[0]] == node
        ]
    return {role: numbers for role, numbers in by_role.items() if numbers}


def _shares_training(config: Config, role: str) -> bool:
    return role == "rollout" and config.rollout_placement == "colocated"


def groups_across_nodes(config: Config, placement: Placement) -> int:
    """Return groups of context and tensor parallel ranks that span several nodes."""
    size = config.policy.parallel.context_parallel * config.policy.parallel.tensor_parallel
    return len(groups_on_several_nodes(placement.pools["training"], size))


CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
ELSEWHERE = "or set resources.ray_address (or RAY_ADDRESS) for a cluster"


def check_machine(config: TrainingConfig, *, dry_run: bool) -> None:
    """Raise ConfigError if this machine has too little for a local Ray. Ray checks a cluster itself.

    dry_run: do not require GPUs on a machine without any, so that GPU configurations can be tried anywhere.
    """
    if config.joins_cluster:
        return
    if not config.uses_gpus:
        if isinstance(config, Config):
            _check_cpus(config)
        return
    gpu_count = sum_reserved(config, "GPU")
    if has_amd_gpus() and not config.gpus and not dry_run:
        raise ConfigError(
            "resources.device=cuda: this machine has AMD GPUs, and ROCm is not supported. Use NVIDIA GPUs, "
            "or set cpu."
        )
    if gpu_count > config.gpus and not (dry_run and config.gpus == 0):
        settings = (
            "policy.data_parallel, rollout.replicas or rollout.tensor_parallel"
            if config.samples
            else "policy.data_parallel"
        )
        raise ConfigError(
            f"the run asks for {gpu_count:g} GPUs and this machine has {config.gpus}. Lower {settings}, "
            f"{ELSEWHERE}."
        )


def _check_cpus(config: Config) -> None:
    cores = len(os.sched_getaffinity(0))
    engines = config.engines
    if engines > cores:
        raise ConfigError(
            f"rollout.replicas={engines} engines are more than the {cores} CPU cores of this machine, and "
            f"each needs one. Lower it, {ELSEWHERE}."
        )
    # A range takes every core that is free.
    most_engines = min(config.engine_range.maximum, cores)
    caches = most_engines * config.rollout.cpu_kv_cache_gib
    memory = memory_gib()
    if caches > memory:
        raise ConfigError(
            f"rollout.replicas * rollout.cpu_kv_cache_gib = {caches:g} GiB of KV cache are more than the "
            f"{memory:.1f} GiB of this machine. Lower them, {ELSEWHERE}."
        )


def memory_gib() -> float:
    total = psutil.virtual_memory().total
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
    return (min(total, int(limit)) if limit.isdigit() else total) / 2**30
