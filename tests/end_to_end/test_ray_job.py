"""`python -m controller.fit` as users start it: in a shell, stopped by Ctrl-C, and through `ray job submit`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.processes import MARK, ROOT, all_end, marked_environment, settings_file, survivors
from workers.model.checkpoint_folder import complete


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_stopped_run_says_so_and_leaves_a_checkpoint_and_no_process(
    stop: signal.Signals, settings: list[str], workspace: Path
) -> None:
    environment = marked_environment()
    command = [sys.executable, "-m", "controller.fit", *settings_file(workspace), *settings]
    command += [f"run.name=interrupted-{stop.name}", "run.steps=1000", "policy.ranks=1"]
    command += ["run.checkpoint_every=1000"]
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    seen = []
    for line in run.stdout:
        seen.append(line)
        if line.startswith("step "):
            break
    if stop is signal.SIGINT:
        os.killpg(run.pid, stop)  # as a terminal does: to the whole foreground group
    else:
        run.send_signal(stop)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 1, errors
    assert "stopped" in errors.splitlines(), errors
    assert re.match(r"step +1/1000  reward \d\.\d+", seen[-1])
    assert all_end(environment[MARK], 30) == []
    lines = (workspace / "runs" / f"interrupted-{stop.name}" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])["step"]
    assert last >= 1
    checkpoints = workspace / "runs" / f"interrupted-{stop.name}" / "checkpoints" / "policy"
    assert [path.name for path, _ in complete(checkpoints)] == [f"step-{last}"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """A Ray begun with `ray start --head`, with token authentication as it is by default; yields its environment."""
    environment = marked_environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    environment |= {"RAY_JOB_STOP_WAIT_TIME_S": "60"}  # by default a stopped job is killed after 3 seconds
    # All unlike the defaults, which the session's own Ray may hold; without its agent's port no job would start.
    ports = ["--port=26379", "--dashboard-port=28265", "--ray-client-server-port=20001"]
    ports.append("--dashboard-agent-listen-port=25365")
    start = ["ray", "start", "--head", "--num-cpus=4", "--disable-usage-stats", *ports]
    subprocess.run(start, env=environment, check=True, capture_output=True, cwd=ROOT)
    yield environment
    # `ray stop` would end every Ray of this machine, the test session's too.
    all_end(environment[MARK], 0)


def run_when_ready(submit: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Submit a job, again for a minute while the head has come up but not yet its job agent."""
    deadline = time.monotonic() + 60
    while True:
        job = subprocess.run(submit, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        if "No available agent to submit job" not in job.stderr or time.monotonic() > deadline:
            return job
        time.sleep(2)


def test_the_same_command_runs_as_a_ray_job(cluster: dict[str, str], settings: list[str], workspace: Path) -> None:
    fit = ["python", "-m", "controller.fit", *settings_file(workspace), *settings]
    fit += ["run.name=job", "run.steps=1", "policy.ranks=1"]
    submit = ["ray", "job", "submit", "--address=http://127.0.0.1:28265", "--working-dir", ".", "--", *fit]
    job = run_when_ready(submit, cluster)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "step 1/1" in job.stdout
    folder = workspace / "runs" / "job"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 1
    token = cluster["RAY_AUTH_TOKEN"]
    written = [path for path in folder.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert written == [], "a run wrote the cluster's token"
    assert token not in job.stdout + job.stderr


@pytest.mark.slow
def test_a_ray_job_is_watched_and_stopped_with_a_checkpoint(
    cluster: dict[str, str], settings: list[str], workspace: Path
) -> None:
    fit = ["python", "-m", "controller.fit", *settings_file(workspace), *settings]
    fit += ["run.name=watched", "run.steps=1000", "policy.ranks=1", "run.checkpoint_every=1000"]

    def job(command: str, *arguments: str) -> str:
        words = ["ray", "job", command, "--address=http://127.0.0.1:28265", *arguments]
        done = run_when_ready(words, cluster)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    job("submit", "--no-wait", "--submission-id=watched", "--working-dir", ".", "--", *fit)
    deadline = time.monotonic() + 240
    while "step    1/1000" not in job("logs", "watched") and time.monotonic() < deadline:
        time.sleep(2)
    assert "step    1/1000" in job("logs", "watched")
    assert "RUNNING" in job("status", "watched")
    job("stop", "watched")
    assert "was stopped" in job("status", "watched")
    deadline = time.monotonic() + 60
    while (left := drivers(cluster[MARK])) and time.monotonic() < deadline:
        time.sleep(1)
    assert left == []
    assert len(complete(workspace / "runs" / "watched" / "checkpoints" / "policy")) == 1


def drivers(mark: str) -> list[str]:
    """Living processes of the mark that are runs of ours, not Ray's."""
    commands = []
    for process in survivors(mark):
        with suppress(psutil.Error):
            commands.append(" ".join(process.cmdline()))
    return [command for command in commands if "controller.fit" in command]
