"""What ray.init raises becomes one sentence, whatever its type; and SIGTERM stays an interrupt."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from controller.config import load
from controller.observability.console import Console
from controller.session import ray_session
from tests.controller.config_workspace import write_workspace
from workers.errors import ResourceError


@pytest.mark.parametrize(
    ("address", "raised", "message"),
    [
        ("", Exception("The current node timed out"), "a local Ray did not start: The current node timed out; is the"),
        ("10.0.0.1:6379", ConnectionError("refused"), "Ray at 10.0.0.1:6379 could not be reached: refused; check res"),
    ],
)
def test_a_ray_that_does_not_come_up_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, raised: Exception, message: str
) -> None:
    def init(**options: object) -> None:
        raise raised

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load(write_workspace(tmp_path))
    config.resources.ray_address = address
    with pytest.raises(ResourceError, match=message), ray_session(config, Console()):
        pass


def test_sigterm_interrupts_a_run_although_ray_handles_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> SimpleNamespace:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return SimpleNamespace(dashboard_url="")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt), ray_session(load(write_workspace(tmp_path)), Console()):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
