"""Ranks that belong together share a node, in whatever order Ray has put equal bundles there."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.actors import engine_actors
from controller.actors.layout import Pool, role_requests, training_pool
from controller.actors.placement import bundle_of_rank, groups_on_several_nodes
from controller.actors.resources import Reservation
from controller.actors.worker_group import Share, WorkerGroup
from controller.config import Config
from tests.refusals import refused
from workers.errors import ResourceError

BUNDLE = {"CPU": 0.5, "GPU": 1.0}


def pool_of(bundles: int, *groups: int, engines: int = 0, engine_ranks: int = 1) -> Pool:
    return Pool(
        "training",
        (BUNDLE,) * bundles,
        groups=groups,
        engines=engines,
        engine_ranks=engine_ranks,
    )


def nodes_of_ranks(pool: Pool, nodes: list[int]) -> list[int]:
    """The node of every rank."""
    return [nodes[bundle] for bundle in bundle_of_rank(pool, nodes)]


def room_for(counts: list[int], size: int) -> int:
    """Whole groups of `size` that nodes with so many bundles can hold."""
    return sum(count // size for count in counts)


def gpu_config(*, ranks: int, cp: int = 1, tp: int = 1, replicate: int = 1) -> Config:
    config = Config()
    config.resources.device, config.policy.data_parallel = "cuda", ranks
    parallel = config.policy.parallel
    parallel.context_parallel, parallel.tensor_parallel, parallel.replicate = (
        cp,
        tp,
        replicate,
    )
    return config


@st.composite
def placed_pools(draw: st.DrawFn) -> tuple[Pool, list[int], list[int]]:
    """A pool, the number of bundles that each node got, and the node of every bundle, in any order.

    Sizes divide each other, and the engine's is among them or between them.
    """
    tensor, context, shard, copies = (
        draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (1, 2, 3), (1, 2), (1, 2))
    )
    groups = (tensor, tensor * context, tensor * context * shard)
    total = groups[-1] * copies * draw(st.integers(1, 4))
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=5)))
    counts = [
        stop - start
        for start, stop in zip([0, *cuts], [*cuts, total], strict=True)
        if stop > start
    ]
    nodes = draw(
        st.permutations([node for node, count in enumerate(counts) for _ in range(count)])
    )
    engine = draw(st.sampled_from([1, *groups]))
    engines = draw(st.integers(0, room_for(counts, engine)))
    return (
        pool_of(total, *groups, engines=engines, engine_ranks=engine),
        counts,
        list(nodes),
    )


@given(placed_pools())
def test_every_rank_has_a_bundle_of_its_own_and_a_nodes_bundles_go_in_order(
    placed: tuple[Pool, list[int], list[int]],
) -> None:
    pool, counts, nodes = placed
    bundles = bundle_of_rank(pool, nodes)
    assert sorted(bundles) == list(range(len(nodes)))
    for node in range(len(counts)):
        on_node = [bundle for bundle in bundles if nodes[bundle] == node]
        assert on_node == sorted(on_node)
    renamed = [f"node {node}" for node in nodes]
    assert bundle_of_rank(pool, renamed) == bundles, "what Ray calls a node must not matter"


@given(placed_pools())
def test_as_many_groups_of_every_size_are_whole_as_the_nodes_have_room_for(
    placed: tuple[Pool, list[int], list[int]],
) -> None:
    """So all of them are, whenever the size divides every node's count."""
    pool, counts, nodes = placed
    found = nodes_of_ranks(pool, nodes)
    for size in pool.groups:
        split = groups_on_several_nodes(found, size)
        assert len(nodes) // size - len(split) == room_for(counts, size)
    shared = found[: pool.engines * pool.engine_ranks]
    assert groups_on_several_nodes(shared, pool.engine_ranks) == []


@given(
    counts=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    group=st.integers(1, 6),
    engine=st.integers(1, 8),
    data=st.data(),
)
def test_an_engine_is_refused_only_where_no_assignment_has_it_on_one_node(
    counts: list[int], group: int, engine: int, data: st.DataObject
) -> None:
    """Also where its GPUs neither divide a group nor are made of whole ones."""
    total = sum(counts) // group * group
    nodes = data.draw(
        st.permutations([n for n, count in enumerate(counts) for _ in range(count)])
    )[:total]
    got = [nodes.count(node) for node in range(len(counts))]
    engines = data.draw(st.integers(0, total // engine))
    pool = pool_of(total, group, engines=engines, engine_ranks=engine)
    if engines > room_for(got, engine):
        with pytest.raises(ResourceError):
            bundle_of_rank(pool, nodes)
    else:
        shared = nodes_of_ranks(pool, nodes)[: engines * engine]
        assert groups_on_several_nodes(shared, engine) == []


def test_groups_keep_their_nodes_where_a_few_engines_of_another_size_can_have_theirs() -> (
    None
):
    nodes = [0, 1] * 6
    found = nodes_of_ranks(pool_of(12, 6, engines=1, engine_ranks=4), nodes)
    assert groups_on_several_nodes(found, 6) == []
    assert len(set(found[:4])) == 1


def test_groups_larger_than_a_node_span_as_few_nodes_as_they_can() -> None:
    found = nodes_of_ranks(pool_of(32, 16), [0, 1, 2, 3] * 8)
    assert [len(set(found[start : start + 16])) for start in (0, 16)] == [2, 2]


def test_uneven_nodes_split_the_last_groups_alone() -> None:
    nodes = [0, 1, 0, 1, 0, 1, 0, 0]  # 5 and 3
    assert nodes_of_ranks(pool_of(8, 2), nodes) == [0, 0, 0, 0, 1, 1, 0, 1]
    assert bundle_of_rank(pool_of(8, 2), nodes) == (0, 2, 4, 6, 1, 3, 7, 5)
    with refused("rollout 3 would share", ResourceError):
        bundle_of_rank(pool_of(8, engines=4, engine_ranks=2), nodes)


def test_the_training_pool_knows_its_groups_and_engines() -> None:
    config = gpu_config(ranks=8, cp=2, tp=4, replicate=4)
    config.rollout.replicas, config.rollout.tensor_parallel = 16, 4
    pool = training_pool(config)
    # A tp group, the ranks that share sequences, a copy of the model.
    assert pool.groups == (4, 8, 16)
    assert (pool.engines, pool.engine_ranks) == (16, 4)
    config.rollout.placement = "apart"
    assert training_pool(config).engines == 0
    experts = gpu_config(ranks=8, cp=2, replicate=2)
    experts.policy.parallel.expert_parallel = 4
    assert training_pool(experts).groups == (1, 2, 4, 8)


def test_an_engine_lives_with_its_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Colocated: in that rank's bundle, whichever it is, and with all its ranks' GPUs."""
    config = gpu_config(ranks=4)
    config.rollout.replicas = config.rollout.tensor_parallel = 2
    requests = {request.role: request for request in role_requests(config)}
    bundles = Reservation(object(), (3, 1, 2, 0))
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(engine_actors.ray, "remote", lambda actor_class: Recorder(asked))
    devices = engine_actors.shared_devices(
        [{"gpus": str(gpu)} for gpu in (5, 4, 7, 6)], *config.colocated_engines
    )
    make = engine_actors.engine_maker(config, bundles, requests["rollout"], devices, b"")
    for replica in range(2):
        make(replica, 0)
    assert [
        options["scheduling_strategy"].placement_group_bundle_index for options in asked
    ] == [3, 2]
    variables = [
        options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] for options in asked
    ]
    assert variables == ["5,4", "7,6"]


def test_actors_of_a_rank_share_its_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "controller.actors.worker_group.ray.remote", lambda actor_class: Recorder(asked)
    )
    monkeypatch.setattr("controller.actors.worker_group.ray.kill", lambda actor: None)
    monkeypatch.setattr(WorkerGroup, "_start", lambda self, *timeouts_s: None)
    bundles = Reservation(object(), (2, 0, 3, 1))
    for role in ("policy", "reference"):
        WorkerGroup(role, object, bundles, Share(0.25, 0.5), dp=2, tp=2)
    indices = [
        options["scheduling_strategy"].placement_group_bundle_index for options in asked
    ]
    assert indices == [2, 0, 3, 1] * 2


class Recorder:
    """Stands in for an actor class: keeps the options that actors are started with."""

    def __init__(self, asked: list[dict[str, Any]]) -> None:
        self.asked = asked

    def options(self, **options: Any) -> "Recorder":
        self.asked.append(options)
        return self

    def remote(self, *args: Any, **kwargs: Any) -> "Recorder":
        return self
