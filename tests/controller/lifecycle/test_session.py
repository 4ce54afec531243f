"""Around a run: what a finished one says, what a lost actor costs, Ray's start and death, the upload at the
end.
"""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from huggingface_hub import HfApi

from controller import fit
from controller.config import Config, load
from controller.config.sections import RunConfig
from controller.engines.fleet import RestartBudget
from controller.lifecycle.local_ray import ray_folder
from controller.lifecycle.session import (
    _raylet_end,
    exit_code,
    push_to_hub,
    ray_session,
    recovering,
    resuming,
)
from controller.observability.console import Console
from controller.preflight.checks import check
from controller.training_loop import Outcome
from tests.controller.config_workspace import refusal, write_workspace
from tests.end_to_end.processes import MARK, all_end, begin, marked_environment
from tests.refusals import refused
from workers.errors import LostError, OutputError, ResourceError, WorkerError
from workers.model.checkpoint.checkpoint_folder import Manifest, commit

RESUME = ("--config", "config.yaml", "run.resume=auto")


@pytest.mark.parametrize(
    "summary", ['{"steps": 10}', '{"steps": 12}', '{"steps": 9}', "", "[]", "{}"]
)
def test_only_a_run_with_steps_left_goes_on(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    summary: str,
) -> None:
    folder = workspace / "runs" / "test"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(summary)
    begun: list[object] = []
    monkeypatch.setattr(fit, "read_inputs", lambda config, log, given: "inputs")
    monkeypatch.setattr(fit, "run", lambda config, inputs, *_: begun.append(inputs))
    assert fit.main(RESUME) == 0
    ended = "1" in summary
    assert begun == ([] if ended else ["inputs"])
    if ended:
        steps = json.loads(summary)["steps"]
        told = (
            f"runs/test has ended after step {steps}. Raise run.steps=10 to continue it\n"
        )
        assert tuple(capsys.readouterr()) == (told, "")


def test_a_command_prepares_and_runs_with_rare_collections_and_restores_pythons() -> None:
    usual = gc.get_threshold()
    thresholds: list[tuple[int, int, int]] = []

    def note() -> None:
        thresholds.append(gc.get_threshold())

    def prepare() -> Callable[[], None]:
        note()
        return note

    assert exit_code(prepare) == 0
    assert len(thresholds) == 2
    assert min(threshold[0] for threshold in thresholds) > usual[0]
    assert gc.get_threshold() == usual


def test_the_summary_has_medians_over_steps() -> None:
    steps = tuple(
        {"time/step_s": s, "throughput/tokens_per_s": 100 / s} for s in (1.0, 2.0, 10.0)
    )
    summary = Outcome({"reward": 0.1}, {"reward": 0.5}, steps, last_step=9).summary()
    assert (summary["seconds_per_step"], summary["tokens_per_second"]) == (2.0, 50.0)
    assert summary["validation"]["after"] == {"reward": 0.5}
    # Also of those that came before the run went on from a checkpoint.
    assert summary["steps"] == 9


# What a lost actor costs


class Attempts:
    """Raises what it is told to, one error an attempt, and then returns; keeps what it was called with."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.resumed: list[str] = []

    def __call__(self, config: Config, budget: RestartBudget) -> RestartBudget:
        self.resumed.append(config.run.resume)
        if self.errors:
            raise self.errors.pop(0)
        return budget


def config_for(folder: Path, **run: object) -> Config:
    settings = {"checkpoint_every": 1, "max_restarts": 2} | run
    return Config(run=RunConfig(name="run", dir=str(folder), **settings))


def write_checkpoint(folder: Path, step: int) -> None:
    path = folder / "run" / "checkpoints" / "policy" / f"step-{step}"
    unfinished = path.with_name(".unfinished")
    unfinished.mkdir(parents=True)
    commit(unfinished, path, Manifest(step, 1, {}, {}, {}))


def test_a_loss_is_made_good_by_another_attempt_that_resumes(tmp_path: Path) -> None:
    said: list[str] = []
    attempts = Attempts(
        LostError("policy dp=1 was lost"), LostError("reference dp=0 was lost")
    )
    write_checkpoint(tmp_path, 2)
    budget = recovering(attempts, config_for(tmp_path), said.append)
    assert attempts.resumed == ["never", "auto", "auto"]
    assert budget.recoveries == 2
    assert said[0] == "policy dp=1 was lost; restarting all roles"


def test_before_its_first_checkpoint_a_run_begins_again_as_it_began(tmp_path: Path) -> None:
    for resume in ("never", "auto", "runs/other"):
        assert resuming(config_for(tmp_path, resume=resume)).run.resume == resume
    write_checkpoint(tmp_path, 1)
    assert resuming(config_for(tmp_path, resume="runs/other")).run.resume == "auto"


def test_with_copies_in_memory_a_run_continues_under_its_name_and_keeps_a_named_checkpoint(
    tmp_path: Path,
) -> None:
    assert (
        resuming(config_for(tmp_path, resume="never", peer_copies=1)).run.resume == "auto"
    )
    assert (
        resuming(config_for(tmp_path, resume="runs/other", peer_copies=1)).run.resume
        == "runs/other"
    )


@pytest.mark.parametrize(
    ("run", "errors", "named"),
    [
        (
            {"checkpoint_every": 0},
            [LostError("lost 1")],
            "lost 1; a run with run.checkpoint_every above 0",
        ),
        (
            {"max_restarts": 2},
            [LostError(f"lost {i}") for i in (1, 2, 3)],
            "lost 3; all of run.max_restarts=2",
        ),
        ({}, [WorkerError("a mistake")], "a mistake"),
    ],
)
def test_what_cannot_be_made_good_stops_the_run_with_the_cause_first(
    tmp_path: Path, run: dict[str, object], errors: list[Exception], named: str
) -> None:
    attempts = Attempts(*errors)
    with refused(named, type(errors[0])):
        recovering(attempts, config_for(tmp_path, **run), lambda text: None)
    assert len(attempts.resumed) == len(errors)


# Ray


@pytest.mark.parametrize(
    ("address", "raised", "named"),
    [
        (
            "",
            Exception("The current node timed out"),
            "a local Ray did not start: The current node timed out",
        ),
        (
            "10.0.0.1:6379",
            ConnectionError("no"),
            "Ray at 10.0.0.1:6379 could not be reached: no",
        ),
    ],
)
def test_a_ray_that_does_not_come_up_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    raised: Exception,
    named: str,
) -> None:
    def init(**options: object) -> None:
        raise raised

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load(write_workspace(tmp_path))
    config.resources.ray_address = address
    with refused(named, ResourceError), ray_session(config, Console()):
        pass


def test_sigterm_interrupts_a_run_although_ray_handles_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options: object) -> SimpleNamespace:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return SimpleNamespace(
            dashboard_url="", address_info={"session_dir": str(tmp_path)}
        )

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            ray_session(load(write_workspace(tmp_path)), Console()),
        ):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


LOCAL_RAY = """
import json, os, psutil, ray, signal, sys, time
from pathlib import Path
from controller.config import load
from controller.observability.console import Console
from controller.lifecycle.session import ray_session
from tests.end_to_end.processes import listening

with ray_session(load(sys.argv[1]), Console()):
    actors = [ray.remote(Console).options(num_cpus=0).remote() for _ in range(4)]
    ray.get([actor.__ray_ready__.remote() for actor in actors])
    folder = Path(ray._private.worker._global_node.get_session_dir_path()).parent
    mode = oct(folder.parent.stat().st_mode)[-4:]
    group = [each.pid for each in psutil.Process().children(recursive=True) if os.getpgid(each.pid) == os.getpgrp()]
    try:
        os.killpg(0, signal.SIGTERM)
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(2)
        goes_on = ray.get(ray.remote(lambda: 1).remote())
    told = {"listening": listening(os.getpid()), "folder": str(folder), "mode": mode}
    told |= {"group": group, "goes_on": goes_on}
    print(json.dumps(told), flush=True)
    (raylet,) = [child for child in psutil.Process().children() if child.name() == "raylet"]
    raylet.send_signal(signal.SIGKILL)
    time.sleep(60)
    ray.get([ray.remote(lambda: 1).options(name="more").remote()])
"""


def test_a_local_ray_is_closed_to_others_and_outlives_a_signal_to_its_runs_group(
    tmp_path: Path,
) -> None:
    """Only here are the sockets of a whole Ray listed, and its raylet killed under a run."""
    base = tempfile.mkdtemp(dir="/tmp")  # sockets need a short path
    environment = marked_environment() | {"RAY_TMPDIR": base}
    command = [sys.executable, "-c", LOCAL_RAY, str(write_workspace(tmp_path))]
    run = begin(command, environment)
    found = next(json.loads(line) for line in run.stdout if line.startswith("{"))
    told = next(line for line in run.stderr if line.startswith("error:"))
    run.kill()
    run.communicate()
    assert all_end(environment[MARK]) == []
    shutil.rmtree(base)
    assert "Ray's raylet ended with signal 9, as when memory is short" in told
    assert "no checkpoint to resume from" in told
    assert len(found["listening"]) >= 5
    assert {address for _, address in found["listening"]} <= {
        "127.0.0.1",
        "::ffff:127.0.0.1",
        "::1",
    }
    assert (found["folder"], found["mode"]) == (f"{base}/ray-{os.getuid()}/ray", "0700")
    assert (found["group"], found["goes_on"]) == ([], 1)


def test_a_folder_that_another_user_took_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"ray-{os.getuid()}").symlink_to(elsewhere)
    folder = ray_folder().parent
    assert (
        folder.parent == tmp_path
        and folder.stat().st_mode & 0o777 == 0o700
        and not folder.is_symlink()
    )


@pytest.mark.parametrize(
    ("code", "word"),
    [("raise SystemExit(0)", "SIGTERM"), ("raise SystemExit(3)", "code 3, as when memory")],
)
def test_the_end_of_a_raylet_is_told_by_its_kind(code: str, word: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", code])
    assert word in _raylet_end(os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT))
    process.wait()


# The hub

HUB = "run.push_to_hub=somebody/sums"


@pytest.fixture
def finished(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The configuration of a run with adapters that has ended, and a token of the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    config = load("config.yaml", [HUB])
    for name in ("model", "adapters"):
        (config.run_folder / name).mkdir(parents=True)
    return config


def test_an_upload_that_cannot_work_is_refused_before_the_run(
    finished: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load("config.yaml", [HUB, "run.name=new"])
    check(config)
    assert "run.push_to_hub=a/b/c: expected owner/name" in refusal(
        "run.push_to_hub=a/b/c", "run.name=new"
    )
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "needs a token of the hub" in refusal(HUB, "run.name=new")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refusal(HUB, "run.name=new")


def test_model_and_adapters_are_uploaded_to_a_private_repository(
    finished: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[Any, ...]] = []

    def create(self: HfApi, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        done.append(("create", repo_id, private, exist_ok))
        return f"https://huggingface.co/{repo_id}"

    def upload(
        self: HfApi,
        *,
        repo_id: str,
        folder_path: Path,
        commit_message: str,
        path_in_repo: str | None = None,
    ) -> None:
        done.append((folder_path.name, path_in_repo))

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    said: list[str] = []
    push_to_hub(finished, said.append)
    assert done == [
        ("create", "somebody/sums", True, True),
        ("model", None),
        ("adapters", "adapters"),
    ]
    assert said == ["pushed to https://huggingface.co/somebody/sums"]
    done.clear()
    push_to_hub(load("config.yaml", ["run.name=new"]), print)
    assert done == []


def test_a_hub_that_refuses_ends_with_what_uploads_the_model_later(
    finished: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(self: HfApi, repo_id: str, **options: object) -> str:
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr(HfApi, "create_repo", create)
    with refused("`hf upload somebody/sums runs/test/model .` uploads it", OutputError):
        push_to_hub(finished, print)
