"""Checks of this machine, and of facts that it does not have: GPUs, drivers, small limits."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.doctor.node_checks import (
    Gpu,
    allocator_findings,
    gpu_findings,
    gpus,
    look,
    network,
    run_folder,
    shared_memory,
    versions,
)
from ballast.doctor.report import Finding, Status
from controller.config import training
from tests.controller.config_workspace import write_model
from workers import allocator

OK, WARN, FAIL = Status.OK, Status.WARN, Status.FAIL
NODE_LINES = ("versions", "GPUs", "speed", "/dev/shm", "network")
"""Names of the findings about a node without a run's folder and models."""
CARD = Gpu("NVIDIA H100 80GB HBM3", 79.1, 78.5)


def test_this_machine_has_every_line(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    write_model(tmp_path / "model")
    models = {
        "model.path": str(tmp_path / "model"),
        "critic.path": str(tmp_path / "gone"),
        "reference.path": "",
    }
    findings, count = look(
        "127.0.0.1", ["torch"], marker=str(tmp_path / "mark"), paths=models
    )
    assert [each.name for each in findings] == [*NODE_LINES, "run.dir", "critic.path"]
    lines = {each.name: each for each in findings}
    assert lines["versions"].text == f"torch {torch.__version__}"
    assert lines["network"] == Finding("network", OK, "lo carries 127.0.0.1")
    assert (
        lines["critic.path"].status,
        "there is no folder" in lines["critic.path"].text,
    ) == (FAIL, True)
    assert count == torch.cuda.device_count()


@pytest.mark.parametrize(
    ("finding", "status", "text", "advice"),
    [
        (
            lambda: versions(["torch>=2", "no-such-package"]),
            FAIL,
            "no-such-package is not installed",
            "'torch>=2' 'no-",
        ),
        (
            lambda: versions(["torch==1.0"]),
            FAIL,
            "is not ==1.0",
            "pip install 'torch==1.0'",
        ),
        (
            lambda: gpu_findings([], "driver too old", True),
            FAIL,
            "driver too old",
            "CUDA_VISIBLE_DEVICES",
        ),
        (lambda: gpu_findings([], "a CPU build", False), OK, "models run on CPUs", ""),
        (
            lambda: gpu_findings([CARD] * 8, "", True),
            OK,
            "8 x NVIDIA H100 80GB HBM3, 78.5 of 79.1 GiB free",
            "",
        ),
        (
            lambda: gpu_findings([CARD, Gpu("", 79.1, 20.0)], "", True),
            WARN,
            "20.0 of 79.1 GiB free",
            "nvidia-smi",
        ),
        (lambda: shared_memory(8.0, 8, 4.0), OK, "8.0 GiB", ""),
        (
            lambda: shared_memory(0.0625, 8, 4.0),
            FAIL,
            "0.1 GiB",
            "NCCL needs it between GPUs; start containers with",
        ),
        (lambda: shared_memory(0.0625, 1, 4.0), WARN, "0.1 GiB", "--shm-size=16g"),
        (
            lambda: shared_memory(2.0, 8, 4.0),
            WARN,
            "less than Ray's object store of 4.0 GiB",
            "--shm-size=16g",
        ),
        (lambda: network("127.0.0.1", 1), OK, "lo carries 127.0.0.1", ""),
        (
            lambda: network("127.0.0.1", 2),
            FAIL,
            "lo carries 127.0.0.1",
            "--node-ip-address",
        ),
        (
            lambda: network("203.0.113.1", 1),
            FAIL,
            "no interface carries 203.0.113.1",
            "--node-ip-address",
        ),
    ],
)
def test_a_fact_is_judged_with_what_to_change(
    finding: Callable[[], Finding], status: Status, text: str, advice: str
) -> None:
    found = finding()
    assert found.status is status
    assert text in found.text
    assert advice in found.advice


def test_gpus_that_torch_cannot_use_are_a_warning_where_cpus_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [Path("/dev/nvidia0")])
    found = gpu_findings([], "Torch not compiled with CUDA enabled", on_gpus=False)
    assert (found.status, found.text) == (
        WARN,
        "torch cannot use nvidia0: Torch not compiled with CUDA enabled",
    )


@pytest.mark.parametrize(("on_gpus", "status"), [(True, FAIL), (False, WARN)])
def test_amd_gpus_are_named(
    on_gpus: bool, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "AMD_DEVICE", tmp_path)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    cards, problem = gpus()
    finding = gpu_findings(cards, problem, on_gpus)
    assert (
        cards == () and finding.status is status and "ROCm is not supported" in finding.text
    )


def test_gpus_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda index: ((index + 1) << 30, 80 << 30)
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    assert gpus() == ((Gpu("card 0", 80.0, 1.0), Gpu("card 1", 80.0, 2.0)), "")


@pytest.mark.parametrize("works", [True, False])
def test_ranks_allocator_is_tried_with_both_kinds_of_segments(
    monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    used: list[str] = []

    def allocate(*_: object, **__: object) -> None:
        if not works and "True" in used[-1]:
            raise RuntimeError("CUDA driver error: operation not supported\nmore")

    monkeypatch.setattr(allocator, "_set", used.append)
    monkeypatch.setattr(torch, "ones", allocate)
    (found,) = allocator_findings([CARD])
    assert {"expandable_segments:True", "expandable_segments:False"} <= set(used)
    assert (found.status, "GPU 0" in found.text) == ((OK, False) if works else (FAIL, True))
    assert allocator_findings([]) == []


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Found no NVIDIA driver\non your system"), AssertionError("CPU build")],
)
def test_torchs_reason_for_seeing_no_gpu_is_told(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def init() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "init", init)
    assert gpus() == ((), str(error).splitlines()[0])


def test_a_run_folder_is_the_drivers_can_be_written_and_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged() -> tuple[Status, str]:
        (found,) = run_folder(str(tmp_path / "mark"))
        return found.status, found.text

    assert run_folder("") == []
    assert judged() == (FAIL, f"{tmp_path} is not the driver's folder of that name")
    (tmp_path / "mark").touch()
    usage: Any = type("Usage", (), {"free": 50 << 30})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert judged() == (OK, "50 GiB free")
    usage.free = 2 << 30
    assert judged() == (WARN, "2 GiB free")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert judged() == (FAIL, f"{tmp_path} cannot be written to")
