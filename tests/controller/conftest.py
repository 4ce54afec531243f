"""Shared by the tests of configurations: a folder with everything that a valid one names, and runs on
stand-ins.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.controller.config_workspace import write_workspace

if TYPE_CHECKING:
    from controller.config import Config
    from controller.fit import Inputs
    from tests.controller.stand_ins.roles import LocalRun
    from tests.controller.stand_ins.run import StandInRun, StandIns
    from workers.batch.remote_batch import RemoteBatch


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with `config.yaml` and what it names."""
    monkeypatch.chdir(tmp_path)
    write_workspace(tmp_path)
    return tmp_path


@pytest.fixture
def dry_run(workspace: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The page of a dry run of `config.yaml`; with `code=2` the lines that refuse it."""
    from controller.fit import main

    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main(["--config", "config.yaml", "--dry-run", *arguments]) == code
        page, errors = capsys.readouterr()
        return errors if code else page

    return run


@pytest.fixture(scope="session")
def stand_in_inputs() -> "Callable[[Config], Inputs]":
    """Data and rewards, read once for all runs with the same."""
    from controller.fit import read_inputs

    known: dict[tuple[str, str], Inputs] = {}

    def read(config: "Config") -> "Inputs":
        key = config.data.validation, repr(config.reward.judge)
        known[key] = known.get(key) or read_inputs(config)
        return known[key]

    return read


@pytest.fixture
def run_on_stand_ins(
    stand_ins: "StandIns", tmp_path: Path, stand_in_inputs: "Callable[[Config], Inputs]"
) -> "Callable[..., StandInRun]":
    """A whole run from overrides, in a second."""
    return lambda *overrides: stand_ins.run(
        [f"run.dir={tmp_path}", *overrides], stand_in_inputs
    )


@pytest.fixture
def local_run(tmp_path: Path) -> "Iterator[Callable[..., LocalRun]]":
    """A run over roles that answer at once, from overrides."""
    from tests.controller.stand_ins.roles import LocalRun

    with ExitStack() as stack:
        yield lambda *overrides: stack.enter_context(
            closing(LocalRun(tmp_path, *overrides))
        )


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> "list[RemoteBatch]":
    """The batch of every step, as the driver holds it."""
    from controller import step

    found: list[RemoteBatch] = []
    learn = step.learn

    def look(run, batch):
        found.append(batch)
        learn(run, batch)

    monkeypatch.setattr(step, "learn", look)
    return found
