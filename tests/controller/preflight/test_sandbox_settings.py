"""Sandboxes: what is refused before anything starts, and what a dry run says."""

from pathlib import Path

import pytest

from controller.config import load
from controller.lifecycle.input_lines import tried_lines
from controller.lifecycle.inputs import try_inputs
from controller.preflight.checks import check
from tests.controller.config_workspace import write_workspace
from tests.refusals import refused
from tests.workers.sandbox.conftest import needs_bubblewrap

AGENT = [
    "rollout.agent_command=python3 agent.py",
    "rollout.max_turns=2",
    'reward.function=""',
]
KIND = "rollout.sandbox.kind"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("")
    return write_workspace(tmp_path)


def test_a_sandbox_without_code_to_run_in_it_is_named(file: Path) -> None:
    with refused(f"{KIND}=bubblewrap"):
        check(load(file, [f"{KIND}=bubblewrap"]))
    with refused("rollout.sandbox.cpus=2"):
        check(load(file, [*AGENT, "rollout.sandbox.cpus=2"]))
    with refused("rollout.tools=workers.sandbox.tools"):
        check(load(file, ["rollout.tools=workers.sandbox.tools"]))


@pytest.mark.parametrize(
    "kind",
    ["chroot", "docker", "docker:tests/image", "bubblewrap:/nowhere", "bubblewrap", "e2b"],
)
def test_what_cannot_be_made_here_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    from workers.sandbox.bubblewrap import find_interpreter
    from workers.sandbox.kinds import _check_kind

    monkeypatch.setenv("PATH", str(tmp_path))
    for cached in (find_interpreter, _check_kind):
        cached.cache_clear()
    with refused(f"{KIND}={kind}"):
        check(load(file, [*AGENT, f"{KIND}={kind}"]))


@needs_bubblewrap
def test_a_dry_run_tries_the_sandbox_and_names_its_limits(file: Path) -> None:
    settings = [*AGENT, f"{KIND}=bubblewrap", "rollout.sandbox.memory_gib=0.5"]
    config = load(file, settings)
    check(config)
    lines = "\n".join(tried_lines(config, try_inputs(config)))
    assert (
        "bubblewrap: a sandbox for each sample, 1 CPUs, 0.5 GiB, 64 processes, no network"
        in lines
    )
    with refused("rollout.sandbox.network=true"):
        check(load(file, [*settings, "rollout.sandbox.network=true"]))
