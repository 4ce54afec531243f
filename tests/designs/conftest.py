"""A workspace and runs on stand-ins for all designs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from balancing import Plan
from controller.actors.worker_group import GroupMethod
from tests.controller.stand_ins.run import StandInRun, StandIns
from tests.designs.configured import write_designs_workspace


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("designs")
    write_designs_workspace(folder)
    return folder


@pytest.fixture
def file(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The configuration's file; its paths are relative to the working directory."""
    monkeypatch.chdir(workspace)
    return str(workspace / "config.yaml")


@pytest.fixture
def run(stand_ins: StandIns, tmp_path: Path) -> Callable[..., StandInRun]:
    """A whole run from overrides, with stand-ins for Ray, vLLM and the training engine."""
    return lambda *overrides: stand_ins.run(
        [f"run.dir={tmp_path}", "data.validation=''", *overrides]
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Plan | None]]:
    """`role.method` of every call of a whole worker group, in order, and the plan that it followed."""
    found: list[tuple[str, Plan | None]] = []
    send = GroupMethod.remote

    def remote(method: GroupMethod, *args: Any, **kwargs: Any) -> Any:
        plans = [argument for argument in args if isinstance(argument, Plan)]
        found.append((f"{method._group.role}.{method._name}", plans[0] if plans else None))
        return send(method, *args, **kwargs)

    monkeypatch.setattr(GroupMethod, "remote", remote)
    return found
