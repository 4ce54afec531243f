"""Through `ray job submit`, with the engine in processes of its own, as on GPUs; else it is a thread of its
actor.
"""

import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.end_to_end.processes import MARK, ROOT, Cluster, living, settings_file, survivors
from tests.json_lines import read_lines
from workers.model.checkpoint.checkpoint_folder import complete

ADDRESS = "--address=http://127.0.0.1:28265"
STEPS = 2


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Stopped jobs have time to end, engines are processes, and no code is compiled: a job is a copy of the
    package.
    """
    found = Cluster(
        0,
        4,
        RAY_JOB_STOP_WAIT_TIME_S="60",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        NUMBA_DISABLE_JIT="1",
    )
    yield found
    found.end()


@pytest.fixture(scope="module")
def cluster(nodes: Cluster) -> dict[str, str]:
    """Its environment."""
    return nodes.environment


def run_when_ready(
    submit: list[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Submit a job, again for a minute while the head has come up but not yet its job agent."""
    deadline = time.monotonic() + 60
    while True:
        job = subprocess.run(
            submit, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
        if (
            "No available agent to submit job" not in job.stderr
            or time.monotonic() > deadline
        ):
            return job
        time.sleep(2)


@dataclass
class Seen:
    """Processes of a cluster while a job runs. parents: by pid, the parent of each; titles: all that `ps`
    showed of it, as they change.
    """

    parents: dict[int, int] = field(default_factory=dict)
    titles: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

    def look(self, raylet: psutil.Process) -> None:
        for process in [raylet, *raylet.children(recursive=True)]:
            with suppress(psutil.Error):
                self.parents.setdefault(process.pid, process.ppid())
                self.titles[process.pid].add(" ".join(process.cmdline()))


@dataclass(frozen=True)
class Finished:
    """lines: of metrics.jsonl."""

    job: subprocess.CompletedProcess[str]
    folder: Path
    seen: Seen
    lines: list[dict[str, float]]


@pytest.fixture(scope="module")
def finished(
    nodes: Cluster, cluster: dict[str, str], settings: list[str], workspace: Path
) -> Finished:
    fit = [
        "python",
        "-m",
        "controller.fit",
        *settings_file(workspace),
        *settings,
        "run.name=job",
        "policy.data_parallel=1",
    ]
    fit += [
        f"run.steps={STEPS}",
        "run.checkpoint_every=1",
        "policy.optimizer.learning_rate=1e-3",
    ]
    (raylet,) = nodes.raylets()
    seen, ended = Seen(), Event()

    def watch() -> None:
        while not ended.wait(0.5):
            seen.look(raylet)

    watcher = Thread(target=watch)
    watcher.start()
    try:
        job = run_when_ready(
            ["ray", "job", "submit", ADDRESS, "--working-dir", ".", "--", *fit], cluster
        )
    finally:
        ended.set()
        watcher.join()
    assert job.returncode == 0, job.stdout + job.stderr
    folder = workspace / "runs" / "job"
    lines = read_lines(folder / "metrics.jsonl")
    return Finished(job, folder, seen, lines)


def test_the_same_command_runs_as_a_ray_job(
    finished: Finished, cluster: dict[str, str]
) -> None:
    assert f"step {STEPS}/{STEPS}" in finished.job.stdout
    assert json.loads((finished.folder / "summary.json").read_text())["steps"] == STEPS
    token = cluster["RAY_AUTH_TOKEN"]
    files = (path for path in finished.folder.rglob("*") if path.is_file())
    assert [path for path in files if token.encode() in path.read_bytes()] == [], (
        "a run wrote the cluster's token"
    )
    assert token not in finished.job.stdout + finished.job.stderr


def test_the_engine_is_a_process_below_its_actor_and_gone_afterwards(
    finished: Finished,
) -> None:
    """By how it was started: whether vLLM can change its title depends on the environment's first
    variable.
    """
    titles, parents = finished.seen.titles, finished.seen.parents
    spawned = {
        pid
        for pid, shown in titles.items()
        if any("spawn_main" in title for title in shown)
    }
    # A core starts workers of its own.
    cores = [pid for pid in spawned if parents[pid] not in spawned]
    assert len(cores) == 1, titles
    actor = parents[cores[0]]
    assert any("VllmEngineActor" in title for title in titles[actor]), titles[actor]
    assert any("raylet" in title for title in titles[parents[actor]]), titles
    assert living([*spawned, actor]) == []


def test_new_weights_reach_the_process(finished: Finished, workspace: Path) -> None:
    """The second step is sampled with the weights of the first update, which are far from those before it."""
    steps = finished.lines[1:]
    assert [step["rollout/oldest_weight_version"] for step in steps] == [0, 1]
    for step in steps:
        assert step["policy/rollout_mismatch_max"] <= 3e-5
    assert difference(workspace / "model", finished.folder / "model") > 1e-2


def difference(first: Path, second: Path) -> float:
    """Mean difference of two models' log-probs of the same text."""
    ids = torch.arange(3, 15)[None]
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (first, second)
    ]
    with torch.no_grad():
        ours, others = (model(ids).logits.log_softmax(-1) for model in models)
    return float((ours - others).abs().mean())


@pytest.mark.slow
def test_a_ray_job_is_watched_and_stopped_with_a_checkpoint(
    cluster: dict[str, str], settings: list[str], workspace: Path
) -> None:
    fit = ["python", "-m", "controller.fit", *settings_file(workspace), *settings]
    fit += [
        "run.name=watched",
        "run.steps=1000",
        "policy.data_parallel=1",
        "run.checkpoint_every=1000",
    ]

    def job(command: str, *arguments: str) -> str:
        words = ["ray", "job", command, ADDRESS, *arguments]
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
