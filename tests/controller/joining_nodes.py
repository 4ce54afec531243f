"""python -m tests.controller.joining_nodes: engines without a model on a Ray cluster whose second node comes,
dies and comes again.

Prints JSON: what happened, with the engines that serve then and the versions that the second one loaded.
"""

import json
from typing import Any

import ray

from controller.actors.engine_rooms import EngineRooms
from controller.actors.layout import Pool
from controller.actors.resources import request_pool, reserve
from controller.engines.elastic_pool import ElasticEnginePool
from controller.engines.fleet import RestartBudget
from tests.end_to_end.changing_cluster import OBJECT_STORE_BYTES, connected_cluster
from workers.config.roles import RolloutConfig

CPUS = 1
ROOM_SECONDS = 60.0


class Engine:
    """A rollout actor that only remembers the versions of its weights."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def start(self) -> None:
        pass

    def update_weights(self, weights: object, version: int) -> None:
        self.versions.append(version)

    def loaded(self) -> list[int]:
        return self.versions


def engines_on(rooms: EngineRooms) -> ElasticEnginePool:
    rooms.add(0, reserve(rooms.pool_of(0), ROOM_SECONDS))

    def make(replica: int, attempt: int) -> Any:
        options = {"num_cpus": CPUS, "scheduling_strategy": rooms.strategy(replica)}
        return ray.remote(Engine).options(**options).remote()

    engines = ElasticEnginePool(
        make,
        RolloutConfig(replicas="1..2"),
        rooms,
        room_timeout_s=ROOM_SECONDS,
        budget=RestartBudget(5),
    )
    engines.start()
    engines.wait_started()
    engines.adjust()
    return engines


def wait_for(engines: ElasticEnginePool, serving: list[int]) -> None:
    """Wait as a round does."""
    while engines.fleet.serving != serving:
        engines.wait([])
        engines.check_deadlines(())


def main() -> dict[str, Any]:
    history: dict[str, Any] = {}
    node = {"num_cpus": CPUS, "object_store_memory": OBJECT_STORE_BYTES}
    with connected_cluster(CPUS) as cluster:
        rooms = EngineRooms(Pool("rollout", ({"CPU": float(CPUS)},)), request_pool)
        engines = engines_on(rooms)
        engines.update_weights(ray.put("first"), 1)
        history["alone"] = (engines.fleet.serving, sorted(rooms.replicas))
        joined = cluster.add_node(**node)
        wait_for(engines, [0, 1])
        history["joined"] = ray.get(engines.actors[1].loaded.remote())
        cluster.remove_node(joined, allow_graceful=False)
        # Which notices that the engine is lost.
        engines.update_weights(ray.put("second"), 2)
        history["left"] = engines.fleet.serving
        cluster.add_node(**node)
        wait_for(engines, [0, 1])
        history["returned"] = ray.get(engines.actors[1].loaded.remote())
        history["first"] = ray.get(engines.actors[0].loaded.remote())
        history["restarts"] = engines.fleet.budget.engines
        rooms.release_all()
        history["released"] = sorted(rooms.replicas)
    return history


if __name__ == "__main__":
    print(json.dumps(main()))
