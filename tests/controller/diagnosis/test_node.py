"""Facts of this machine, and of one with GPUs whose driver and devices are stand-ins."""

import os
import socket
import stat
from pathlib import Path

import psutil
import pytest
import torch

from controller.diagnosis import device_sharing, node
from controller.diagnosis.device_sharing import sharing_problem
from controller.diagnosis.node import Asked, Gpu, look
from tests.controller.config_workspace import write_model


def test_this_machine_says_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mark").touch()
    write_model(tmp_path / "model")
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    models = {"model.path": str(tmp_path / "model"), "critic.path": str(tmp_path / "gone")}
    facts = look(Asked(("torch", "no-such-package"), str(tmp_path), "mark", models), "127.0.0.1")
    assert facts.node == socket.gethostname()
    assert facts.versions == {"torch": torch.__version__}
    assert (facts.driver, facts.cuda) == ("", torch.version.cuda or "")
    assert len(facts.gpus) == torch.cuda.device_count()
    assert facts.cpus == len(os.sched_getaffinity(0))
    assert 0 < facts.free_memory_gib <= facts.memory_gib == psutil.virtual_memory().total / 2**30
    assert facts.open_files > 0
    assert facts.shm_gib > 0
    assert facts.interface == "lo"
    assert facts.folder == ""
    assert facts.free_disk_gib > 0
    assert facts.models.keys() == {"critic.path"}
    assert "there is no folder" in facts.models["critic.path"]


def test_an_address_that_no_interface_has_is_on_none() -> None:
    assert node.interface_of("203.0.113.1") == ""


def test_a_folder_without_the_drivers_mark_is_another_of_that_name(tmp_path: Path) -> None:
    problem, _ = node.folder_problem(Asked((), str(tmp_path), "mark"))
    assert problem == f"{tmp_path} is not the driver's folder of that name"


@pytest.mark.parametrize(
    ("script", "version"),
    [("echo 580.65.06; echo 580.65.06", "580.65.06"), ("echo no driver; exit 9", ""), (None, "")],
    ids=["driver", "none", "no nvidia-smi"],
)
def test_the_driver_is_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, version: str
) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert node.driver_version() == version


def test_gpus_are_those_of_torch_with_their_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three devices, of which the last reaches no other; whether memory can be shared is asked once."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((index + 1) << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: 2 not in (i, j))
    monkeypatch.setattr(node, "sharing_problem", lambda device: asked.append(device) or "no handle")
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = look(Asked(()), "127.0.0.1")
    assert facts.gpus == (Gpu("card 0", 80.0, 1.0), Gpu("card 1", 80.0, 2.0), Gpu("card 2", 80.0, 3.0))
    assert facts.without_peer_access == ((0, 2), (1, 2))
    assert (facts.sharing, asked) == ("no handle", ["cuda"])


def test_another_process_reads_memory_of_this_one() -> None:
    """Host memory here, by the same way as CUDA handles go."""
    assert sharing_problem("cpu") == ""


def answer_wrongly(tensor: torch.Tensor, connection: device_sharing.Connection) -> None:
    connection.send(0.0)


def die(tensor: torch.Tensor, connection: device_sharing.Connection) -> None:
    os._exit(7)


@pytest.mark.parametrize(
    ("other", "problem"),
    [(answer_wrongly, "another process got 0.0 from it, and not the sum 1024"), (die, "ended with code 7")],
)
def test_a_process_that_cannot_read_it_is_told(other: object, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sharing, "_answer_sum", other)
    assert problem in sharing_problem("cpu")
