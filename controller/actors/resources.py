"""Reserve the bundles of the layout, or raise an error that names missing resources.

Pool --reserve, request_pool--> Reservation.strategy(rank) --> actors of that rank, of each role in the pool
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from controller.actors.layout import Bundle, Pool
from controller.actors.placement import bundle_of_rank
from workers.errors import ResourceError


@dataclass(frozen=True)
class Reservation:
    """A pool's bundles, reserved until `release`. bundle_of_rank: the bundle of every rank."""

    group: PlacementGroup
    bundle_of_rank: tuple[int, ...]

    def strategy(self, rank: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=self.bundle_of_rank[rank]
        )

    @property
    def is_placed(self) -> bool:
        """Whether Ray has placed all bundles, and no node with one of them was lost since."""
        return bool(placement_group_table(self.group)["state"] == "CREATED")

    def release(self) -> None:
        remove_placement_group(self.group)


def reserve(pool: Pool, timeout_s: float) -> Reservation:
    """Reserve the pool's bundles and assign them to ranks. Raises ResourceError, naming missing resources."""
    group = _place(pool, timeout_s)
    try:
        return Reservation(group, bundle_of_rank(pool, nodes_of(group)))
    except ResourceError:
        remove_placement_group(group)
        raise


def request_pool(pool: Pool) -> Reservation:
    """Ask for the pool's bundles without waiting, see `Reservation.is_placed`. Any bundle suits any rank."""
    group = placement_group(list(pool.bundles), strategy=pool.strategy, name=pool.name)
    return Reservation(group, tuple(range(len(pool.bundles))))


def nodes_of(group: PlacementGroup) -> list[str]:
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[index] for index in range(len(nodes))]


def _place(pool: Pool, timeout_s: float) -> PlacementGroup:
    group = placement_group(list(pool.bundles), strategy=pool.strategy, name=pool.name)
    deadline = time.monotonic() + timeout_s
    while not group.wait(min(1.0, timeout_s)):
        # Ray would wait forever for a node, but a request above all nodes together fails at once.
        impossible = shortage(pool, ray.cluster_resources())
        if impossible or time.monotonic() > deadline:
            message = _shortage_message(pool, timeout_s)
            remove_placement_group(group)
            raise ResourceError(message)
    return group


def shortage(pool: Pool, available: Mapping[str, Any]) -> Bundle:
    total: Bundle = {}
    for bundle in pool.bundles:
        for resource, amount in bundle.items():
            total[resource] = total.get(resource, 0.0) + amount
    missing = {
        resource: amount - float(available.get(resource, 0.0))
        for resource, amount in total.items()
    }
    return {resource: amount for resource, amount in missing.items() if amount > 1e-9}


def _shortage_message(pool: Pool, timeout_s: float) -> str:
    cluster = ray.cluster_resources()
    free = ray.available_resources()
    missing = shortage(pool, cluster) or shortage(pool, free)
    place = "the whole cluster" if shortage(pool, cluster) else "what other jobs left free"
    lacks = ", ".join(f"{amount:g} {resource}" for resource, amount in missing.items())
    if not missing:
        largest = max(pool.bundles, key=lambda bundle: sum(bundle.values()))
        place = "one node"
        lacks = f"room for a bundle of {largest}"
    counts = {
        resource: f"{free.get(resource, 0):g} free of {cluster.get(resource, 0):g}"
        for resource in sorted(pool.bundles[0])
    }
    return (
        f"placement group {pool.name!r} ({len(pool.bundles)} bundles of {pool.bundles[0]}) was not placed "
        f"within {timeout_s:g} s: {lacks} missing in {place} ({counts}). Start more nodes, lower "
        "policy.data_parallel or rollout.replicas, or raise resources.placement_timeout_s."
    )
