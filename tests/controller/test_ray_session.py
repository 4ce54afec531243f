"""What ray.init raises becomes one sentence, whatever its type; and SIGTERM stays an interrupt."""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from controller.config import load
from controller.lifecycle.session import ray_session
from controller.observability.console import Console
from tests.controller.config_workspace import write_workspace
from tests.end_to_end.processes import MARK, all_end, begin, marked_environment
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
        return SimpleNamespace(dashboard_url="", address_info={"session_dir": str(tmp_path)})

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt), ray_session(load(write_workspace(tmp_path)), Console()):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


LOCAL_RAY = """
import json, os, psutil, ray, signal, sys, time
from controller.config import load
from controller.observability.console import Console
from controller.lifecycle.session import ray_session
from tests.end_to_end.processes import listening

with ray_session(load(sys.argv[1]), Console()):
    ray.get(ray.remote(lambda: 1).remote())
    folder = ray._private.worker._global_node.get_session_dir_path()
    modes = [oct(os.stat(path).st_mode)[-4:] for path in (os.path.dirname(folder), folder)]
    print(json.dumps({"listening": listening(os.getpid()), "modes": modes}), flush=True)
    (raylet,) = [child for child in psutil.Process().children() if child.name() == "raylet"]
    raylet.send_signal(signal.SIGKILL)
    time.sleep(60)
    ray.get([ray.remote(lambda: 1).options(name="more").remote()])
"""


@pytest.mark.alone
def test_a_local_ray_listens_on_this_machine_alone_and_its_death_is_told_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOCAL_RAY, str(write_workspace(tmp_path))]
    environment = marked_environment()
    run = begin(command, environment)
    found = next(json.loads(line) for line in run.stdout if line.startswith("{"))
    told = next(line for line in run.stderr if line.startswith("error:"))
    run.kill()
    run.communicate()
    assert all_end(environment[MARK], 30) == []
    assert "Ray's raylet ended with signal 9" in told
    assert "no checkpoint to go on from" in told
    assert len(found["listening"]) >= 5
    assert {address for _, address in found["listening"]} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert found["modes"] == ["1777", "0700"]
