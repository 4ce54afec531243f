"""Two runs never share a folder: one process at a time has it, whatever run.resume says and
however it ends.
"""

import errno
import fcntl
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from controller import fit
from controller.checkpoints.run_lock import LOCK, lock_run
from controller.config import load
from tests.end_to_end.processes import ROOT
from tests.refusals import refused
from workers.errors import ConfigError

STARTER = """
import sys
from controller.config import load
from controller.checkpoints.run_lock import lock_run

def run():
    print("runs", flush=True)
    sys.stdin.readline()

config = load("config.yaml", sys.argv[1:])
print("ready", flush=True)
sys.stdin.readline()
try:
    lock_run(config, run)()
except Exception as error:
    print(error, flush=True)
"""

Process = subprocess.Popen[str]


def told(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


def go(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def start(workspace: Path) -> Iterator[Callable[..., Process]]:
    """Starts a process that has read the configuration and locks the folder once `go` tells it to."""
    processes: list[Process] = []

    def started(*overrides: str) -> Process:
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "text": True,
        }
        process = subprocess.Popen(
            [sys.executable, "-c", STARTER, *overrides],
            cwd=workspace,
            env={"PYTHONPATH": str(ROOT)},
            **pipes,
        )
        processes.append(process)
        assert told(process.stdout) == "ready"
        return process

    yield started
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("resume", ["run.resume=never", "run.resume=auto"])
def test_of_two_that_start_at_once_one_runs_and_the_other_is_refused(
    workspace: Path, start: Callable[..., Process], resume: str
) -> None:
    both = [start(resume), start(resume)]
    for process in both:
        go(process)
    winner, loser = sorted(
        ((told(process.stdout), process) for process in both),
        key=lambda found: found[0] != "runs",
    )
    assert winner[0] == "runs"
    # the other, if it has not written its name yet
    holder = f"(process {winner[1].pid} on .+|another process)"
    assert re.match(f"run.name: runs/test is in use by {holder}\\.", loser[0])
    winner[1].kill()
    winner[1].wait()
    after = start(resume)
    go(after)
    assert told(after.stdout) == "runs", "a lock ends with its process"
    go(after)
    after.wait()
    assert not (workspace / "runs" / "test").exists(), (
        "a run that wrote nothing leaves nothing"
    )


def test_two_that_were_given_no_name_and_start_at_once_have_a_folder_each(
    workspace: Path, start: Callable[..., Process]
) -> None:
    both = [start("run.name=''") for _ in range(2)]  # each has read that the name is free
    for process in both:
        go(process)
    assert [told(process.stdout) for process in both] == ["runs", "runs"]
    locks = (workspace / "runs").glob("*/.lock")
    assert sorted(path.parent.name for path in locks) == [
        workspace.name,
        f"{workspace.name}-2",
    ]


def test_a_run_without_a_name_leaves_alone_what_another_has_written_since(
    workspace: Path,
) -> None:
    config = load("config.yaml", ["run.name=''"])
    taken = config.run_folder
    taken.mkdir(parents=True)
    (taken / "config.yaml").touch()
    lock_run(config, lambda: (config.run_folder / "config.yaml").touch())()
    assert config.run_folder == taken.with_name(f"{taken.name}-2")
    assert (config.run_folder / "config.yaml").exists()
    with refused("run.name"):
        lock_run(load("config.yaml", [f"run.name={taken.name}"]), lambda: None)


def test_the_command_refuses_a_folder_that_is_in_use(
    workspace: Path,
    start: Callable[..., Process],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    holder = start()
    go(holder)
    assert told(holder.stdout) == "runs"
    monkeypatch.setattr(fit, "read_inputs", lambda config, log, given: "inputs")
    monkeypatch.setattr(fit, "run", lambda *_: pytest.fail("it has started"))
    assert fit.main(["--config", "config.yaml"]) == 2
    assert "is in use by process" in capsys.readouterr().err


def test_a_folder_that_a_run_has_written_to_is_for_resuming_alone(workspace: Path) -> None:
    config, folder = load("config.yaml"), workspace / "runs" / "test"
    lock_run(config, lambda: folder.joinpath("config.yaml").touch())()
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]
    with refused("run.name"):
        lock_run(config, lambda: pytest.fail("it has started"))
    ran: list[bool] = []
    lock_run(
        load("config.yaml", ["run.resume=auto"]),
        lambda: ran.append((folder / LOCK).exists()),
    )()
    assert ran == [True]


def test_a_run_that_fails_before_it_writes_can_be_started_again_in_a_folder_of_its_user_alone(
    workspace: Path,
) -> None:
    modes: list[int] = []

    def fail() -> None:
        modes.append((workspace / "runs" / "test").stat().st_mode & 0o777)
        raise ConfigError("no GPU")

    for _ in range(2):
        with refused("no GPU"):
            lock_run(load("config.yaml"), fail)()
    assert modes == [0o700, 0o700]
    assert not (workspace / "runs" / "test").exists()


def test_a_file_system_without_locks_is_said(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    lock_run(load("config.yaml"), lambda: None)()
    assert "runs/test cannot be locked (No locks available)" in capsys.readouterr().out
