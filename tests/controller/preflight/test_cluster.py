"""Placement on a described cluster: every actor has a place with room, or one sentence says what
is missing.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.actors.layout import pools, role_requests
from controller.config import Config
from controller.fit import main
from controller.preflight.cluster import (
    FIGURES,
    Cluster,
    groups_across_nodes,
    parse_cluster,
    place,
    roles_on_node,
)
from controller.preflight.describe_cluster import placement_lines
from tests.refusals import refused
from workers.errors import ConfigError

EIGHT = Cluster(nodes=1, cpus=64, gpus=8, gpu_gib=80)


def gpu_config(**policy: int) -> Config:
    config = Config()
    config.resources.device = "cuda"
    for name, value in policy.items():
        setattr(config.policy, name, value)
    return config


def test_a_cluster_is_read_from_one_line() -> None:
    read = parse_cluster("nodes=8, gpus=8,gpu_gib=80,cpus=96.5,memory_gib=1024")
    assert read == Cluster(nodes=8, cpus=96.5, gpus=8, gpu_gib=80, memory_gib=1024)
    assert parse_cluster("nodes=1,cpus=2") == Cluster(nodes=1, cpus=2)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("8x8xH100", "'8x8xH100'"),
        ("nodes=1,cpus=four", "'cpus=four'"),
        ("nodes=1", "cpus"),
        ("nodes=0,cpus=1", "nodes"),
        ("nodes=1.5,cpus=1", "whole"),
        ("nodes=1,cpus=8,gpus=8", "gpu_gib"),
        ("nodes=10000000,gpus=8,gpu=H100", "nodes=10000000"),
        ("nodes=50000,gpus=8,gpu=H100", "nodes=50000"),
        ("nodes=1,nodes=2,cpus=8", "nodes"),
        ("nodes=1,gpus=8,gpu=H100,gpu=A100", "gpu"),
        *((f"nodes=1,gpus=8,gpu=H100,{name}=0", f"{name}=0") for name in FIGURES),
        (f"nodes=1,gpus=8,gpu=H100,bandwidth=1{'0' * 400}", "bandwidth=1"),
    ],
)
def test_a_line_of_another_form_is_refused(text: str, named: str) -> None:
    with refused(named):
        parse_cluster(text)


@given(
    ranks=st.integers(1, 24),
    replicas=st.integers(1, 6),
    tensor=st.integers(1, 4),
    nodes=st.integers(1, 4),
    gpus=st.integers(1, 8),
    placement=st.sampled_from(["colocated", "apart"]),
)
def test_no_node_gives_more_than_it_has(
    ranks: int, replicas: int, tensor: int, nodes: int, gpus: int, placement: str
) -> None:
    config = gpu_config(data_parallel=ranks)
    config.rollout.replicas, config.rollout.tensor_parallel, config.rollout.placement = (
        replicas,
        tensor,
        placement,
    )
    if placement == "colocated":
        config.rollout.replicas = min(replicas, max(1, ranks // tensor))
    cluster = Cluster(nodes=nodes, cpus=4, gpus=gpus, gpu_gib=80)
    asked = sum(bundle.get("GPU", 0.0) for pool in pools(config) for bundle in pool.bundles)
    try:
        found = place(config, cluster)
    except ConfigError as error:
        assert "does not fit" in str(error) or "lives on one" in str(error)
        return
    assert asked <= nodes * gpus
    for node in range(nodes):
        given_here = [
            bundle
            for pool in pools(config)
            for place_of, bundle in zip(found.pools[pool.name], pool.bundles, strict=True)
            if place_of == node
        ]
        assert sum(bundle.get("GPU", 0.0) for bundle in given_here) <= gpus
        assert (
            sum(bundle["CPU"] for bundle in given_here) + 0.25 * found.rewards.count(node)
            <= 4 + 1e-9
        )
    for request in role_requests(config):
        placed = [
            i
            for node in range(nodes)
            for i in roles_on_node(config, found, node).get(request.role, [])
        ]
        assert sorted(placed) == list(range(request.actors))


def test_what_does_not_fit_is_named() -> None:
    with refused("bundle 8 of pool training"):
        config = gpu_config(data_parallel=9)
        config.rollout.replicas = 9
        place(config, EIGHT)
    config = gpu_config(data_parallel=4)
    config.rollout.placement, config.rollout.tensor_parallel = "apart", 8
    with refused("bundle 0 of pool rollout"):
        place(config, EIGHT)
    place(config, Cluster(nodes=2, cpus=64, gpus=8, gpu_gib=80))


def test_an_engine_that_shares_gpus_stays_on_one_node() -> None:
    config = gpu_config(data_parallel=6)
    config.rollout.replicas, config.rollout.tensor_parallel = 3, 2
    with refused("rollout 2 would share"):
        place(config, Cluster(nodes=2, cpus=8, gpus=3, gpu_gib=80))
    config.rollout.replicas = 2
    placed = place(config, Cluster(nodes=2, cpus=8, gpus=3, gpu_gib=80))
    assert placed.pools["training"] == (0, 0, 1, 1, 0, 1)


@pytest.mark.parametrize(
    ("changed", "nodes", "named"),
    [
        ({"expert_parallel": 4}, 1, {"expert_parallel=4"}),
        ({"expert_parallel": 4}, 2, {"replicate=1"}),
        ({"expert_parallel": 4, "replicate": 2}, 2, set()),
        ({"pipeline_parallel": 2}, 2, {"replicate=1", "reshard_after_forward=true"}),
        ({}, 1, set()),
    ],
)
def test_notes_say_what_sharding_costs_where_ranks_lie(
    changed: dict[str, int], nodes: int, named: set[str]
) -> None:
    config = gpu_config(data_parallel=8 // changed.get("pipeline_parallel", 1))
    for name, value in changed.items():
        setattr(config.policy.parallel, name, value)
    cluster = Cluster(nodes=nodes, cpus=64, gpus=8 // nodes, gpu_gib=80)
    lines = placement_lines(config, cluster, place(config, cluster))
    assert {
        line.split(" ")[1].rpartition(".")[2] for line in lines if "note: " in line
    } == named


def test_groups_that_cross_the_network_are_counted() -> None:
    config = gpu_config(data_parallel=4)
    config.policy.parallel.context_parallel = 2
    config.rollout.placement = "apart"
    assert (
        groups_across_nodes(
            config, place(config, Cluster(nodes=3, cpus=8, gpus=4, gpu_gib=80))
        )
        == 0
    )
    assert (
        groups_across_nodes(
            config, place(config, Cluster(nodes=3, cpus=8, gpus=3, gpu_gib=80))
        )
        == 1
    )


DryRun = Callable[..., str]
ON_GPUS = ("resources.device=auto", "--cluster", "nodes=1,gpus=2,gpu_gib=80,cpus=8")


def test_a_described_cluster_needs_config_json_alone_and_no_data(
    workspace: Path, dry_run: DryRun
) -> None:
    for name in ("model/model.safetensors", "model/tokenizer.json", "train.jsonl"):
        (workspace / name).unlink()
    page = dry_run(*ON_GPUS, "--no-measure")
    assert "== memory, measured" in page
    assert "train.jsonl: not on this machine, so neither read nor scored" in page
    assert "numerics: model.path has no weights on this machine" in page
    assert "model has no weights" in dry_run("resources.device=auto", code=2)


def test_a_model_of_the_hub_is_asked_for_its_config_json_alone(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = "model.path=nobody/nothing"
    assert main(["--config", "config.yaml", "--dry-run", *ON_GPUS, model]) == 2
    told = capsys.readouterr()
    assert "model.path=nobody/nothing: asking the hub for config.json" in told.out
    assert "`hf download nobody/nothing config.json` where there is a network" in told.err


def test_cpu_nodes_have_a_placement_and_no_gpu_memory(
    dry_run: DryRun, capsys: pytest.CaptureFixture[str]
) -> None:
    page = dry_run("resources.device=auto", "--cluster", "nodes=2,cpus=0.5")
    placement = "node 0: policy 0..1\nnode 1: rollout 0, reward 0\n"
    assert f"2 nodes with 0.5 CPUs each\n{placement}" in page
    assert "== memory" not in page
    refusal = dry_run("resources.device=auto", "--cluster", "nodes=1,cpus=0.5", code=2)
    assert "the run does not fit on 1 node with 0.5 CPUs each" in refusal
    assert main(["--config", "config.yaml", "--cluster", "nodes=1,cpus=8"]) == 2
    assert "Add --dry-run" in capsys.readouterr().err


def test_functions_and_records_are_tried_before_memory_is_measured(
    workspace: Path, dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    monkeypatch.setattr("controller.preflight.describe_cluster.measure", measured.append)
    (workspace / "reward.py").write_text("def reward(response, gone):\n    return 0.0\n")
    assert "gone" in dry_run(*ON_GPUS, code=2)
    assert measured == []
