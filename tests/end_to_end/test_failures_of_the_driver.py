"""The driver, the disk, the object store and a node: each fails under a run that is started as users start
it.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.faults import without_validation
from tests.end_to_end.processes import (
    MARK,
    ROOT,
    Cluster,
    all_end,
    marked_environment,
    settings_file,
)
from tests.json_lines import read_lines
from workers.model.checkpoint.checkpoint_folder import complete

pytestmark = pytest.mark.soak
SMALL = (
    "policy.data_parallel=1",
    "policy.optimizer.learning_rate=1e-3",
    "tracking.tensorboard=false",
)


class Run:
    """A run in a process of its own; `lines` is what it has said so far."""

    def __init__(
        self,
        settings: list[str],
        workspace: Path,
        name: str,
        *more: str,
        **environment: str,
    ) -> None:
        self.folder = workspace / "runs" / name
        self.environment = marked_environment() | environment
        command = [
            sys.executable,
            "-m",
            "controller.fit",
            *settings_file(workspace),
            *without_validation(settings),
            *SMALL,
        ]
        self.command = [*command, f"run.name={name}", *more]
        self.lines: list[str] = []

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def until(self, pattern: str) -> str:
        """The first line from now on that the pattern is found in."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if re.search(pattern, line):
                return line
        raise AssertionError(f"{pattern!r} was never said: {self.lines}")

    def end(self) -> int:
        assert self.process.stdout is not None
        self.lines += [line.rstrip() for line in self.process.stdout]
        return self.process.wait(timeout=120)

    def metrics(self) -> list[dict[str, float]]:
        return read_lines(self.folder / "metrics.jsonl")

    def steps(self) -> list[float]:
        return [line["step"] for line in self.metrics()]

    def checkpoints(self) -> list[str]:
        return [path.name for path, _ in complete(self.folder / "checkpoints" / "policy")]

    def pid_of(self, title: str) -> int:
        """A worker of the run's own Ray; its environment, and the mark in it, is hidden by its title, which
        Ray writes anew with every call: it may be read half written.
        """
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if title in " ".join(child.cmdline()):
                        return child.pid
        raise AssertionError(f"there is no process {title}")


@pytest.fixture
def start(settings: list[str], workspace: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(name: str, *more: str, **environment: str) -> Run:
        runs.append(Run(settings, workspace, name, *more, **environment))
        runs[-1].start()
        return runs[-1]

    yield begin
    for run in runs:
        all_end(run.environment[MARK], 0)


def test_a_driver_killed_while_it_saves_goes_on_from_the_checkpoint_before(start) -> None:
    settings = (
        "killed-saving",
        "run.steps=12",
        "run.checkpoint_every=1",
        "run.resume=auto",
    )
    run = start(*settings)
    run.until(r"^step +3")
    policy = run.pid_of("PolicyWorker")
    os.kill(policy, signal.SIGSTOP)  # whatever step it saves now is never complete
    os.kill(run.process.pid, signal.SIGKILL)
    os.kill(policy, signal.SIGKILL)
    run.end()
    assert all_end(run.environment[MARK]) == []
    stood = run.checkpoints()
    assert stood and "step-12" not in stood
    again = start(*settings)
    again.until(f"going on from .*{stood[-1]}$")
    assert again.end() == 0, again.lines
    assert run.steps() == list(range(13))
    assert run.checkpoints() == ["step-11", "step-12"]


def test_a_full_disk_costs_checkpoints_and_no_step(start) -> None:
    run = start(
        "full-disk",
        "run.steps=6",
        "run.checkpoint_every=1",
        "run.keep_checkpoints=1",
        "run.save_every=0",
    )
    run.until(r"^step 2")
    worker = run.pid_of("PolicyWorker")
    usual = resource.prlimit(worker, resource.RLIMIT_FSIZE)
    # Files of more bytes cannot be written.
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (100_000, usual[1]))
    said = run.until("could not be saved")
    assert said.count("\n") == 1 and "The run continues" in said
    assert len(run.checkpoints()) == 1
    resource.prlimit(worker, resource.RLIMIT_FSIZE, usual)
    assert run.end() == 0, run.lines
    assert run.steps() == list(range(7))
    assert run.metrics()[-1]["checkpoint/failures"] >= 1
    assert run.checkpoints() == ["step-6"]


def test_steps_without_a_number_are_skipped_and_then_stop_the_run_by_name(start) -> None:
    """A learning rate beyond all reason makes the second step's losses NaN."""
    more = (
        "policy.optimizer.learning_rate=1e30",
        "policy.optimizer.max_skipped_steps=2",
        "run.steps=9",
    )
    run = start("nan", *more)
    assert run.end() == 1
    assert re.search(
        r"^error: policy dp=0: 2 optimiser steps in a row were skipped .* NaN or infinite",
        run.lines[-1],
    )
    assert all_end(run.environment[MARK]) == []


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []

    def begin(*options) -> Cluster:
        clusters.append(Cluster(100, *options))
        return clusters[-1]

    yield begin
    for started in clusters:
        started.end()


def test_engines_of_a_lost_node_start_elsewhere(start, cluster) -> None:
    """The head has room for the policy and the rewards alone; engines are on the other nodes."""
    nodes = cluster(2, "--include-dashboard=false")
    first = nodes.add_node(1)
    # More steps than are made while the second node comes up.
    more = (
        "run.steps=30",
        "resources.cpus_per_worker=1",
        "rollout.threads=1",
        "run.checkpoint_every=5",
    )
    run = start("lost-node", *more, **nodes.joined)
    run.until(r"^step 2")
    nodes.add_node(1)
    for process in [*first.children(recursive=True), first]:
        process.kill()
    run.until("rollout replica 0 was lost.*starting a new one|restarting all roles")
    assert run.end() == 0, run.lines
    assert run.steps() == list(range(31))


def test_a_small_object_store_spills_and_loses_nothing(start, cluster) -> None:
    """Weights of 12 MB a step in a store of 80 MB, most of which something else holds on to."""
    nodes = cluster(4, f"--object-store-memory={80 * 10**6}", "--include-dashboard=false")
    hold = "import ray, time, numpy; ray.init(); "
    hold += "held = [ray.put(numpy.zeros(9 * 10**6, numpy.uint8)) for _ in range(12)]"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{hold}; print('held', flush=True); time.sleep(600)"],
        env=nodes.joined,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    run = start("spill", "run.steps=4", **nodes.joined)
    assert run.end() == 0, run.lines
    assert run.steps() == list(range(5))
    spilled = list(Path("/tmp/ray").glob("session_*/**/ray_spilled_objects*/*"))
    assert spilled
    holder.kill()
