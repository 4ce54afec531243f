"""Assigns ranks to bundles: ranks that communicate in every layer, and the GPUs of one engine, share a node.

    Pool --Ray reserves--> node of every bundle --bundle_of_rank--> bundle of every rank, the same for all roles

Ray packs the bundles of a pool onto nodes in an order of its own (it sorts them by a sort that is not stable), so that
bundles i and i + 1 often lie on different nodes. Ranks are therefore dealt to nodes, in groups of consecutive ranks,
largest groups first: each node takes as many whole groups of a size as it has room for, then of the next smaller size.

    groups of 2 on nodes of 5 and 3 bundles     0 1 2 3 | 4 5     then one by one     6 | 7

A node of c bundles has room for floor(c / s) whole groups of size s. Where every size divides the next one, every node
takes exactly that many of every size, and no other deal keeps more groups whole.
"""

import math
from collections.abc import Hashable, Iterator, Sequence

from controller.actors.layout import Pool
from workers.errors import ResourceError


def bundle_of_rank(pool: Pool, nodes: Sequence[Hashable]) -> tuple[int, ...]:
    """Index of the bundle of every rank; `nodes[i]` is the node of bundle i, by any name.

    Nodes are taken from the fullest on, and the bundles of a node in their order: what Ray gave decides all.
    Raises ResourceError if the GPUs that a colocated engine shares with the ranks would lie on several nodes.
    """
    rooms = _rooms(nodes)
    deals = [_deal([len(room) for room in rooms], sizes) for sizes in _sizes(pool)]
    node_of_rank = min(deals, key=lambda deal: _split(pool, deal))
    _check_engines(pool, node_of_rank, rooms)
    bundles = [iter(room) for room in rooms]
    return tuple(next(bundles[node]) for node in node_of_rank)


def groups_on_several_nodes(nodes: Sequence[Hashable], size: int) -> list[int]:
    """Numbers of the groups of `size` consecutive ranks on more than one node; `nodes[i]` is that of rank i."""
    groups = [nodes[start : start + size] for start in range(0, len(nodes), size)]
    return [number for number, group in enumerate(groups) if len(set(group)) > 1]


def _rooms(nodes: Sequence[Hashable]) -> list[list[int]]:
    """The bundles of every node, in their order; nodes with more bundles first, so that large groups span few nodes."""
    rooms: dict[Hashable, list[int]] = {}
    for bundle, node in enumerate(nodes):
        rooms.setdefault(node, []).append(bundle)
    return sorted(rooms.values(), key=len, reverse=True)


def _sizes(pool: Pool) -> Iterator[list[int]]:
    """Sizes to deal in, the smallest first, each a divisor of the next.

    An engine whose GPUs neither divide a group nor are made of whole ones is dealt in blocks that hold both; where that
    costs a group and no engine, the groups alone decide.
    """
    engine = pool.engine_ranks if pool.engines else 1
    yield sorted({engine, *(size if engine % size == 0 else math.lcm(size, engine) for size in pool.groups)})
    yield sorted(pool.groups)


def _deal(rooms: list[int], sizes: list[int]) -> list[int]:
    """The node of every rank, by its place in `rooms`, which has the number of bundles of every node."""
    left, dealt = list(rooms), []
    for size in [*reversed(sizes), 1]:
        for node, room in enumerate(left):
            taken = room // size * size
            dealt += [node] * taken
            left[node] -= taken
    return dealt


def _split(pool: Pool, nodes: list[int]) -> list[int]:
    """Numbers of engines, and of groups of each size from the smallest, that span several nodes."""
    groups = [len(groups_on_several_nodes(nodes, size)) for size in sorted(pool.groups)]
    return [len(_split_engines(pool, nodes)), *groups]


def _split_engines(pool: Pool, nodes: list[int]) -> list[int]:
    return groups_on_several_nodes(nodes[: pool.engines * pool.engine_ranks], pool.engine_ranks)


def _check_engines(pool: Pool, nodes: list[int], rooms: list[list[int]]) -> None:
    split = _split_engines(pool, nodes)
    if split:
        counts = " + ".join(str(len(room)) for room in rooms)
        raise ResourceError(
            f"rollout {split[0]} would share GPUs of several nodes, but an engine lives on one: pool {pool.name} has "
            f"{counts} bundles on its nodes, and an engine takes {pool.engine_ranks} of one node; choose "
            "rollout.tensor_parallel so that it divides the GPUs of a node, or rollout.placement=apart."
        )
