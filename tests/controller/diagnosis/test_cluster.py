"""The parts that ask Ray: nodes, the run's place, and an all-reduce by real ranks."""

from pathlib import Path

import pytest
import ray

from controller.config import load
from controller.diagnosis import all_reduce, cluster
from controller.diagnosis.findings import Status
from controller.diagnosis.node import Asked, NodeFacts
from controller.preflight.cluster import Cluster
from tests.controller.config_workspace import write_workspace
from tests.controller.diagnosis.machines import CARD, cpu_node, gpu_node

GIB = 2**30


def test_a_task_on_every_node_brings_its_facts(ray_session: None) -> None:
    (node,) = cluster.nodes()
    found = cluster.look_at([node], Asked(("torch",)))
    assert isinstance(found[node.address], NodeFacts)
    assert found[node.address].address == node.address
    assert found[node.address].versions.keys() == {"torch"}


def test_a_node_that_is_gone_is_an_error_and_not_an_end(ray_session: None) -> None:
    gone = cluster.Node("ab" * 28, "10.0.0.9", {})
    found = cluster.look_at([gone], Asked(()))
    assert isinstance(found["10.0.0.9"], ray.exceptions.RayError)


def test_ranks_on_a_cpu_add_up_and_are_timed(ray_session: None) -> None:
    config = load(None, ["model.path=none", "run.name=doctor", "resources.device=cpu"])
    found = all_reduce.time_all_reduce(config, 2)
    assert found.status is Status.OK
    assert found.text.startswith("16 MiB over 2 ranks by gloo in ")
    assert not [actor for actor in ray.util.list_named_actors() if actor.startswith("link")]


def test_a_rank_with_a_wrong_sum_is_named() -> None:
    found = all_reduce.judged(3, [(0.1, 3.0), (0.1, 2.0), (0.1, 3.0)], "cpu")
    assert (found.status, found.text) == (Status.FAIL, "rank 1 got 2 where 3 ones add up to 3")


@pytest.mark.parametrize(
    ("gpus", "seen", "device", "status"),
    [
        (0.0, 0, "cpu", Status.OK),
        (8.0, 8, "cuda", Status.OK),
        (0.0, 8, "cuda", Status.FAIL),
        (0, 0, "cuda", Status.FAIL),
    ],
)
def test_ray_must_offer_the_gpus_that_torch_sees(gpus: float, seen: int, device: str, status: Status) -> None:
    node = cluster.Node("1", "10.0.0.1", {"CPU": 16.0, "GPU": gpus, "object_store_memory": 8.0 * GIB})
    found = cluster.offered([node], seen, device)
    assert found.status is status
    assert f"1 node, 16 CPUs, {gpus:g} GPUs, object store of 8.0 GiB on a node" in found.text


def test_the_cluster_is_taken_to_be_as_its_smallest_node() -> None:
    nodes = [cluster.Node(str(i), f"10.0.0.{i}", {"CPU": cpus}) for i, cpus in ((1, 64.0), (2, 32.0))]
    facts = [gpu_node(), gpu_node(gpus=(CARD,) * 4, memory_gib=512.0)]
    assert cluster.smallest(facts, nodes) == Cluster(2, cpus=32.0, gpus=4, gpu_gib=79.1, memory_gib=512.0)
    assert cluster.smallest([cpu_node(), gpu_node()], nodes).gpu_gib == 0.0
    assert cluster.in_words(cluster.smallest(facts, nodes)) == "nodes=2,gpus=4,gpu_gib=79,cpus=32,memory_gib=512"


def test_whether_a_run_has_room_is_the_dry_runs_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(write_workspace(tmp_path), [f"model.path={tmp_path / 'model'}"])
    found = cluster.fits(config, Cluster(2, cpus=8.0))
    assert (found.status, found.text) == (Status.OK, "2 nodes as these have room for all roles of the run")
    found = cluster.fits(config, Cluster(1, cpus=0.25))
    assert found.status is Status.FAIL
    assert "the run does not fit on 1 node" in found.text
    assert found.advice == "see --dry-run --cluster nodes=1,cpus=0.25,memory_gib=0"
    assert capsys.readouterr().out == ""
