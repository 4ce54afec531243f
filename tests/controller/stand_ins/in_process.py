"""Jobs on CPUs in this process: Ray alone is a stand-in. vLLM, the training engine and rewards are the real ones.

Each process of a real Ray imports what its actor needs: an engine starts in 3 CPU seconds here, in 25 there.
"""

import os
from contextlib import nullcontext
from typing import Any

import pytest

from tests.controller.stand_ins.local_ray import LocalRay
from tests.controller.stand_ins.run import LocalReservation, NoMetrics
from workers.config.rollout import RolloutConfig
from workers.engine.vllm_interface import cpu_environment
from workers.network import GLOO, NCCL

CPUS = LocalReservation([[]] * 8)
"""No rank has a GPU."""


def put_ray_in_process(monkeypatch: pytest.MonkeyPatch) -> LocalRay:
    """Run actors in this process until the test ends. Returns their Ray."""
    local = LocalRay({})
    local.install(monkeypatch)
    # An actor sets these for its process. Here they must end with the test: ranks of later ones inherit them.
    # A later local run would listen on the machine's address.
    interfaces = dict.fromkeys((GLOO, NCCL), "lo")
    for name, value in (cpu_environment(RolloutConfig(threads=1)) | interfaces).items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    monkeypatch.setattr("controller.actors.launch.reserve", lambda pool, timeout_s: CPUS)
    monkeypatch.setattr("controller.observability.ray_metrics.RayMetrics", NoMetrics)
    monkeypatch.setattr(
        "controller.sampling.sampling_run.ray_session", lambda *_, **__: nullcontext()
    )
    # The real one ends all processes below its actor's, which here is the tests'.
    monkeypatch.setattr(
        "workers.rollout.engine_actor.end_engine",
        lambda engine: engine and engine.shutdown(),
    )
    # vLLM looks for its kernels in every module, and llvmlite's library has no namespace to look into.
    monkeypatch.setattr("vllm.triton_utils.dispatcher.vars", _namespace, raising=False)
    return local


def _namespace(value: Any) -> dict[str, Any]:
    names = value.__dict__
    return names if hasattr(names, "keys") else {}
