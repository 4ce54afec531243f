"""Runs in processes of their own, and whether any of these is left."""

import os
import sys
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
MARK = "BALLAST_TEST_RUN"


def marked_environment() -> dict[str, str]:
    """This environment with a mark that every process started from it inherits, and without a cluster of ours."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    binaries = str(Path(sys.executable).parent)
    return environment | {MARK: uuid.uuid4().hex, "PATH": f"{binaries}:{environment['PATH']}"}


def survivors(mark: str) -> list[psutil.Process]:
    """Living processes that carry the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def living(pids: Iterable[int], seconds: float = 20.0) -> list[int]:
    """Which of the processes still run after at most `seconds`; one that nobody has waited for does not."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_end(mark: str, seconds: float) -> list[str]:
    """What of the marked processes still lives after at most `seconds`; it is killed."""
    deadline = time.monotonic() + seconds
    while (left := survivors(mark)) and time.monotonic() < deadline:
        time.sleep(0.5)
    names = [" ".join(process.cmdline())[:200] for process in left if process.is_running()]
    for process in left:
        process.kill()
    return names


def settings_file(workspace: Path) -> list[str]:
    """An empty configuration file: everything comes from overrides."""
    file = workspace / "empty.yaml"
    file.write_text("{}\n")
    return ["--config", str(file)]
