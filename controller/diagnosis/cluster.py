"""The cluster that Ray knows: facts of every node, what Ray offers, and whether a configuration fits.

ray.nodes() --a task on each--> NodeFacts --judgement--> findings
as many nodes, each as the smallest --the dry run's checks--> fits
"""

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from controller.config import Config
from controller.config.training import counted
from controller.diagnosis.findings import Finding, fail, ok
from controller.diagnosis.node import GIB, Asked, NodeFacts, look
from controller.preflight.cluster import Cluster, run_on
from controller.preflight.describe_cluster import print_cluster
from workers.errors import ConfigError

LOOK_SECONDS = 180.0


@dataclass(frozen=True)
class Node:
    """A node of the Ray cluster."""

    number: str
    address: str
    resources: Mapping[str, float]

    @property
    def object_store_gib(self) -> float:
        """Size of the node's object store."""
        return self.resources.get("object_store_memory", 0.0) / GIB


def nodes() -> list[Node]:
    """The nodes that are alive."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]
    ]


def look_at(found: Sequence[Node], asked: Asked) -> dict[str, Any]:
    """Facts of every node by its address, or the error of the task that was to gather them."""
    # A task without GPUs of its own would see none: Ray is told to leave the variable alone.
    environment = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    task = ray.remote(look)
    refs = {}
    for node in found:
        there = NodeAffinitySchedulingStrategy(node.number, soft=False)
        options = task.options(num_cpus=0, scheduling_strategy=there, runtime_env=environment, name="doctor")
        refs[node.address] = options.remote(asked, node.address)
    ray.wait(list(refs.values()), num_returns=len(refs), timeout=LOOK_SECONDS)
    return {address: _answer(ref) for address, ref in refs.items()}


def _answer(ref: Any) -> Any:
    try:
        return ray.get(ref, timeout=1.0)
    except ray.exceptions.RayError as error:
        ray.cancel(ref, force=True)
        return error


def offered(found: Sequence[Node], gpus_seen: int, device: str) -> Finding:
    """A finding about the resources that Ray offers. gpus_seen: by torch, on all nodes."""
    total = {name: sum(node.resources.get(name, 0.0) for node in found) for name in ("CPU", "GPU")}
    store = min(node.object_store_gib for node in found)
    text = (
        f"{counted(len(found), 'node')}, {total['CPU']:g} CPUs, {total['GPU']:g} GPUs, "
        f"object store of {store:.1f} GiB on a node"
    )
    if device == "cuda" and total["GPU"] < max(1, gpus_seen):
        return fail("Ray", f"{text}, and torch sees {gpus_seen} GPUs", "start Ray with --num-gpus")
    return ok("Ray", text)


def smallest(facts: Sequence[NodeFacts], ray_nodes: Sequence[Node]) -> Cluster:
    """A cluster of as many nodes, each with the resources of the smallest."""
    cards = [[gpu.total_gib for gpu in node.gpus] for node in facts]
    count = min(map(len, cards))
    return Cluster(
        nodes=len(facts),
        cpus=min(node.resources.get("CPU", 0.0) for node in ray_nodes),
        gpus=count,
        gpu_gib=min((gib for node in cards for gib in node), default=0.0) if count else 0.0,
        memory_gib=min(node.memory_gib for node in facts),
    )


def fits(config: Config, cluster: Cluster) -> Finding:
    """A finding about the dry run's check that every role and its memory fit."""
    run_on(config, cluster)
    try:
        with redirect_stdout(io.StringIO()):  # the page is the dry run's
            print_cluster(config, cluster)
    except ConfigError as error:
        advice = f"see --dry-run --cluster {in_words(cluster)}"
        return fail("the run's place", str(error).rstrip("."), advice)
    return ok("the run's place", f"{counted(cluster.nodes, 'node')} as these have room for all roles of the run")


def in_words(cluster: Cluster) -> str:
    """The cluster as `--cluster` takes it."""
    gpus = f"gpus={cluster.gpus},gpu_gib={cluster.gpu_gib:.0f}," if cluster.gpus else ""
    return f"nodes={cluster.nodes},{gpus}cpus={cluster.cpus:g},memory_gib={cluster.memory_gib:.0f}"
