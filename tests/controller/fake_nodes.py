"""python -m tests.controller.fake_nodes NODES: a Ray cluster of nodes of 8 GPUs that are not there, on this
machine.

Reserves what two configurations for all GPUs ask for and prints, as JSON, where everything is. A process of
its own, because one process has one Ray; its files lie apart, because Ray notes the last cluster of a machine
there.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from controller.actors.layout import Pool, pools, training_pool
from controller.config import Config

GPUS, CPUS, OBJECT_STORE_BYTES = 8, 16, 80 * 2**20


def configurations(nodes: int) -> dict[str, Config]:
    """All GPUs train and generate in turn; or half of them train, two a sequence, and half generate, four an
    engine.
    """
    colocated, apart = Config(), Config()
    for config in (colocated, apart):
        config.resources.device, config.rollout.tensor_parallel = "cuda", 4
        config.policy.parallel.context_parallel = 2
    colocated.policy.data_parallel, colocated.rollout.replicas = (
        nodes * GPUS // 2,
        nodes * GPUS // 4,
    )
    colocated.algorithm.loss.kl_coefficient = 0.1  # a reference beside the policy
    apart.rollout.placement = "apart"
    apart.policy.data_parallel, apart.rollout.replicas = (
        nodes * GPUS // 4,
        nodes * GPUS // 8,
    )
    return {"colocated": colocated, "apart": apart}


def placements(nodes: int) -> dict[str, dict[str, Any]]:
    """Of every configuration and pool: bundles' and ranks' nodes, as Ray says, and what asked actors see."""
    from controller.actors.resources import nodes_of, reserve

    found: dict[str, dict[str, Any]] = {}
    for name, config in configurations(nodes).items():
        reservations = {pool.name: reserve(pool, 60) for pool in pools(config)}
        bundles = {
            pool: nodes_of(reservation.group) for pool, reservation in reservations.items()
        }
        ranks = {
            pool: [bundles[pool][bundle] for bundle in reservation.bundle_of_rank]
            for pool, reservation in reservations.items()
        }
        asked = (
            ask(reservations["training"], training_pool(config))
            if name == "colocated"
            else []
        )
        found[name] = {"bundles": bundles, "ranks": ranks, "asked": asked}
        for reservation in reservations.values():
            reservation.release()
    return found


def ask(reservation: Any, pool: Pool) -> list[tuple[int, str, list[str]]]:
    """(rank, node, GPUs) as two actors of each of the first and the last engine's ranks see them."""
    import ray

    @ray.remote(num_cpus=0.25, num_gpus=0.5)
    class Actor:
        def sees(self) -> tuple[str, list[str]]:
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids()["GPU"]

    ranks = [0, pool.engine_ranks - 1, len(pool.bundles) - 1]
    actors = [
        (rank, Actor.options(scheduling_strategy=reservation.strategy(rank)).remote())
        for rank in ranks * 2
    ]
    return [(rank, *ray.get(actor.sees.remote())) for rank, actor in actors]


@contextmanager
def cluster_of(nodes: int) -> Iterator[None]:
    """A connection to a new cluster, which ends; about 4 s a node."""
    with tempfile.TemporaryDirectory(
        prefix="ray-", dir="/tmp"
    ) as folder:  # short: there are sockets in it
        os.environ["RAY_TMPDIR"] = folder
        import ray
        from ray.cluster_utils import Cluster

        node = {
            "wait": False,
            "num_cpus": CPUS,
            "num_gpus": GPUS,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
        cluster = Cluster()
        try:
            head = {
                "include_dashboard": False,
                "_system_config": {"prestart_worker_first_driver": False},
            }
            cluster.add_node(**node, **head)
            for _ in range(nodes - 1):
                cluster.add_node(**node)
            cluster.wait_for_nodes()
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    with cluster_of(int(sys.argv[1])):
        print(json.dumps(placements(int(sys.argv[1]))))
