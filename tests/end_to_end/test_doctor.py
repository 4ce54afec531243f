"""`python -m ballast doctor` on this machine: every line, what is left of it, and that it can be stopped."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ballast.doctor.test_node_checks import NODE_LINES
from tests.end_to_end.processes import (
    MARK,
    all_end,
    begin,
    marked_environment,
    settings_file,
)

LINES = (
    "configuration",
    *NODE_LINES,
    "run.dir",
    "Ray",
    "all-reduce",
    "engine and rank",
    "log-probs before an update",
    "log-probs after it",
)
pytestmark = pytest.mark.slow


def doctor(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return begin([sys.executable, "-m", "ballast.doctor", *arguments], environment)


def test_a_machine_that_runs_work_on_has_every_line_and_exit_code_0(
    settings: list[str], workspace: Path
) -> None:
    """In a folder that is not there yet."""
    environment, folder = marked_environment(), workspace / "not" / "yet"
    run = doctor(
        environment,
        *settings_file(workspace),
        *settings,
        f"run.dir={folder}",
        "run.name=examined",
    )
    output, errors = run.communicate(timeout=600)
    assert run.returncode == 0, output + errors
    found = dict(
        re.fullmatch(r"(?:ok  |warn)  ([^:]+): (.+)", line).groups()
        for line in output.splitlines()
    )
    assert tuple(found) == LINES
    assert "over 2 ranks by gloo in" in found["all-reduce"]
    for name in LINES[-2:]:
        assert float(re.search(r"differ by (\S+) nats", found[name]).group(1)) < 1e-4
    assert not folder.parent.exists()
    assert all_end(environment[MARK]) == []


def test_ctrl_c_ends_all_that_was_started() -> None:
    environment = marked_environment()
    run = doctor(environment)
    for line in run.stdout:
        if line.startswith("ok    all-reduce"):  # then roles start
            break
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 1
    assert "stopped" in errors.splitlines()
    assert all_end(environment[MARK]) == []
