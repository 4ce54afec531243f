"""Assign ranks to bundles: ranks that communicate in every layer, and the GPUs of one engine, share a node.

    Pool --Ray reserves--> node of every bundle --bundle_of_rank--> bundle of every rank, for all roles

Ray orders bundles by an unstable sort, so bundles i and i + 1 often lie on different nodes. Groups of
consecutive ranks are therefore assigned to nodes, largest groups first: each node takes as many whole groups
as it has room for.

    groups of 2 on nodes of 5 and 3 bundles     0 1 2 3 | 4 5     then one by one     6 | 7

A node of c bundles has room for floor(c / s) groups of size s. If every size divides the next, every node
takes exactly that many of every size, and no other assignment keeps more groups whole.
"""

import math
from collections.abc import Hashable, Iterator, Sequence

from controller.actors.layout import Pool
from workers.errors import ResourceError


def bundle_of_rank(pool: Pool, nodes: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the bundle of every rank. `nodes[i]` is the node of bundle i, by any name.

    Raises ResourceError if a colocated engine would span several nodes.
    """
    rooms = _rooms(nodes)
    bundle_counts = [len(room) for room in rooms]
    assignments = [_assign(bundle_counts, sizes) for sizes in _sizes(pool)]
    node_of_rank = min(assignments, key=lambda nodes: _split(pool, nodes))
    _check_engines(pool, node_of_rank, rooms)
    bundles = [iter(room) for room in rooms]
    return tuple(next(bundles[node]) for node in node_of_rank)


def groups_on_several_nodes(nodes: Sequence[Hashable], size: int) -> list[int]:
    """Return the numbers of groups of `size` consecutive ranks that span nodes. `nodes[i]` is rank i's."""
    groups = [nodes[start : start + size] for start in range(0, len(nodes), size)]
    return [number for number, group in enumerate(groups) if len(set(group)) > 1]


def _rooms(nodes: Sequence[Hashable]) -> list[list[int]]:
    rooms: dict[Hashable, list[int]] = {}
    for bundle, node in enumerate(nodes):
        rooms.setdefault(node, []).append(bundle)
    return sorted(rooms.values(), key=len, reverse=True)


def _sizes(pool: Pool) -> Iterator[list[int]]:
    """Group sizes, smallest first, each a divisor of the next.

    An engine that neither divides a group nor consists of whole groups joins a block of both. If that splits
    a group and saves no engine, the groups alone decide.
    """
    engine = pool.engine_ranks if pool.engines else 1
    yield sorted(
        {
            engine,
            *(
                size if engine % size == 0 else math.lcm(size, engine)
                for size in pool.groups
            ),
        }
    )
    yield sorted(pool.groups)


def _assign(rooms: list[int], sizes: list[int]) -> list[int]:
    free_rooms = list(rooms)
    assigned = list[int]()
    for size in [*reversed(sizes), 1]:
        for node, room in enumerate(free_rooms):
            count = room // size * size
            assigned += [node] * count
            free_rooms[node] -= count
    return assigned


def _split(pool: Pool, nodes: list[int]) -> list[int]:
    groups = [len(groups_on_several_nodes(nodes, size)) for size in sorted(pool.groups)]
    return [len(_split_engines(pool, nodes)), *groups]


def _split_engines(pool: Pool, nodes: list[int]) -> list[int]:
    return groups_on_several_nodes(
        nodes[: pool.engines * pool.engine_ranks], pool.engine_ranks
    )


def _check_engines(pool: Pool, nodes: list[int], rooms: list[list[int]]) -> None:
    split = _split_engines(pool, nodes)
    if split:
        counts = " + ".join(str(len(room)) for room in rooms)
        raise ResourceError(
            f"rollout {split[0]} would share GPUs of several nodes, but an engine lives on one: pool "
            f"{pool.name} has {counts} bundles on its nodes, and an engine takes {pool.engine_ranks} of one "
            "node. Choose rollout.tensor_parallel so that it divides the GPUs of a node, or "
            "rollout.placement=apart."
        )
