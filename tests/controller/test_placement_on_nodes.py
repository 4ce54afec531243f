"""On a real Ray cluster of nodes of 8 GPUs, groups and engines stay on a node.

About 17 CPU seconds: only here does Ray itself place the bundles of several nodes.
"""

import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from controller.actors.placement import groups_on_several_nodes
from tests.controller.fake_nodes import GPUS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[4, pytest.param(8, marks=pytest.mark.slow)])
def nodes(request: pytest.FixtureRequest) -> int:
    """4 s each."""
    return request.param


@pytest.fixture(scope="module")
def placed(nodes: int) -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, "-m", "tests.controller.fake_nodes", str(nodes)],
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_pairs_and_engines_that_share_gpus_stay_on_a_node(
    nodes: int, placed: dict[str, Any]
) -> None:
    ranks = placed["colocated"]["ranks"]["training"]
    assert set(Counter(ranks).values()) == {GPUS}
    assert len(ranks) == nodes * GPUS
    assert groups_on_several_nodes(ranks, 2) == []
    assert groups_on_several_nodes(ranks, 4) == []
    assert groups_on_several_nodes(placed["colocated"]["bundles"]["training"], 2), (
        "Ray's own order is as good"
    )


def test_pairs_stay_on_a_node_where_engines_have_gpus_of_their_own(
    nodes: int, placed: dict[str, Any]
) -> None:
    ranks, engines = (placed["apart"]["ranks"][pool] for pool in ("training", "rollout"))
    assert (len(ranks), len(engines)) == (nodes * 4, nodes)
    assert groups_on_several_nodes(ranks, 2) == []
    used = Counter(ranks) + Counter(
        {node: 4 * count for node, count in Counter(engines).items()}
    )
    assert set(used.values()) == {GPUS}


def test_actors_see_the_node_and_the_gpu_of_their_rank(placed: dict[str, Any]) -> None:
    """Two roles of a rank have the same GPU, and an engine's first and last rank have two of one node."""
    ranks, seen = placed["colocated"]["ranks"]["training"], defaultdict(set)
    for rank, node, gpus in placed["colocated"]["asked"]:
        assert node == ranks[rank]
        seen[rank].add((node, *gpus))
    assert [len(places) for places in seen.values()] == [1, 1, 1]
    assert len({place for places in seen.values() for place in places}) == 3
    first, last = (seen[rank].copy().pop() for rank in (0, 3))
    assert first[0] == last[0]
