"""A run killed in the middle goes on as if it had not been."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.processes import MARK, ROOT, all_end, marked_environment, settings_file


def command(settings: list[str], workspace: Path, name: str) -> list[str]:
    fit = [sys.executable, "-m", "controller.fit", *settings_file(workspace), *settings]
    fit += [f"run.name={name}", "run.steps=6", "run.checkpoint_every=3", "run.resume=auto"]
    return [*fit, "batch.mini_batches=2", "policy.optimizer.learning_rate=1e-3"]


def records(workspace: Path, name: str) -> list[dict]:
    lines = (workspace / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_killed_run_goes_on_as_if_it_had_not_been(settings: list[str], workspace: Path) -> None:
    """Killed after step 5, it goes on from the checkpoint of step 3: steps 4 and 5 come again and are the same."""
    environment, fit = marked_environment(), command(settings, workspace, "killed")
    run = subprocess.Popen(fit, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)
    for line in run.stdout:
        if line.startswith("step 5"):
            break
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert all_end(environment[MARK], 60) == []
    before = records(workspace, "killed")[:6]

    resumed = subprocess.run(fit, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert resumed.returncode == 0, resumed.stderr
    assert "going on from" in resumed.stdout
    assert "step 3/6" not in resumed.stdout
    assert "step 4/6" in resumed.stdout
    after = records(workspace, "killed")
    assert [record["step"] for record in after] == list(range(7))
    for first, second in zip(before, after, strict=False):
        for name in ("reward/mean", "rollout/response_tokens_mean", "rollout/weight_version", "validation/reward"):
            assert first.get(name) == second.get(name), (first["step"], name)
        for name in ("policy/loss", "policy/learning_rate"):
            assert first.get(name) == pytest.approx(second.get(name), abs=1e-6)
    checkpoints = workspace / "runs" / "killed" / "checkpoints" / "policy"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-3", "step-6"]
