"""Runs whose agents ask for sessions by HTTP: whatever dies, what agents were told is trained, once."""

from pathlib import Path

import psutil
import pytest

from controller.engines import engine_pool
from tests.end_to_end import faults
from tests.end_to_end.elsewhere import KEY, Agents, agent_settings, free_port, unaccounted
from workers.config.roles import GATEWAY_KEY

pytestmark = pytest.mark.usefixtures("ray_session")


def kill_front(run: object) -> None:
    found = [
        process.pid
        for process in psutil.Process().children(recursive=True)
        if "SessionFront" in " ".join(process.cmdline())
    ]
    assert found
    faults.send(faults.signal.SIGKILL, found, after_s=0.5)


def test_agents_lose_no_turn_when_an_engine_and_the_front_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout actor is killed in step 1 and the front in step 2, while agents play."""
    monkeypatch.setenv(GATEWAY_KEY, KEY)
    monkeypatch.setattr(engine_pool, "LOOK_SECONDS", 1.0)
    port = free_port()
    settings = [
        *agent_settings(tmp_path, "elsewhere"),
        "rollout.replicas=2",
        "run.steps=2",
        "rollout.agent=http",
    ]
    with Agents(port) as agents:
        run = faults.run_with(
            [*settings, f"rollout.gateway.port={port}"],
            {1: faults.kill_actor, 2: kill_front},
        )
    assert run.last["restarts/engines"] == 1
    assert agents.failures == []
    assert unaccounted(run.config, agents, steps=2) == []
    assert len(agents.rewards) == 24 == sum(agents.asked.values())
