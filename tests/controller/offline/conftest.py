"""Runs on given sequences whose engines are real, and whose Ray is a stand-in."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from controller.training_loop import Outcome
from tests.controller.offline.local_run import run_offline, write_offline_workspace
from tests.controller.stand_ins.local_ray import LocalRay
from tests.controller.stand_ins.run import LocalReservation, NoMetrics
from tests.workers.model.ranks import end_process_groups


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Outcome]]:
    """`run_offline`, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    write_offline_workspace(tmp_path)
    LocalRay({}).install(monkeypatch)
    monkeypatch.setattr(
        "controller.actors.launch.reserve", lambda pool, timeout_s: LocalReservation([[]])
    )
    monkeypatch.setattr("controller.observability.ray_metrics.RayMetrics", NoMetrics)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start = torch.distributed.init_process_group  # policy and reference are of one process
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda *given, **named: (
            torch.distributed.is_initialized() or start(*given, **named)
        ),
    )
    yield run_offline
    end_process_groups()
