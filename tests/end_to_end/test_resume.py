"""A run killed in the middle goes on as if it had not been."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from controller.observability.run_folder import RunFolder, step_file
from controller.sample_files import read_samples
from controller.step_samples import read_step
from tests.end_to_end.processes import MARK, ROOT, all_end, marked_environment, settings_file

PROMPTS, SAMPLES = 5, 3  # of a step, of a prompt


def command(settings: list[str], workspace: Path, name: str) -> list[str]:
    fit = [sys.executable, "-m", "controller.fit", *settings_file(workspace), *settings]
    fit += [f"run.name={name}", "run.steps=6", "run.checkpoint_every=3", "run.resume=auto"]
    return [*fit, "batch.mini_batches=2", "policy.optimizer.learning_rate=1e-3"]


def records(workspace: Path, name: str) -> list[dict]:
    lines = (workspace / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def kill_after(begin: str, fit: list[str], environment: dict[str, str]) -> None:
    """Start the command, and kill its driver when it has said a line that begins so."""
    run = subprocess.Popen(fit, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)
    for line in run.stdout:
        if line.startswith(begin):
            break
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert all_end(environment[MARK], 60) == []


def test_a_killed_run_goes_on_as_if_it_had_not_been(settings: list[str], workspace: Path) -> None:
    """Killed after step 5, it goes on from the checkpoint of step 3: steps 4 and 5 come again and are the same."""
    environment, fit = marked_environment(), command(settings, workspace, "killed")
    kill_after("step 5", fit, environment)
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


@pytest.mark.slow  # tests/controller/test_continuous_collector.py has the rules
def test_a_killed_run_that_generates_ahead_trains_every_prompt_once_on_the_tokens_that_it_had(
    settings: list[str], workspace: Path
) -> None:
    """Killed after step 5, it goes on from the checkpoint of step 3 with the samples that no step had trained on."""
    environment, fit = marked_environment(), command(settings, workspace, "ahead-killed")
    fit += ["rollout.max_staleness=2", "rollout.sampling.max_new_tokens=64", "run.record_samples=true"]
    fit += ["policy.max_tokens=256", "policy.optimizer.learning_rate=1e-4"]
    kill_after("step 5", fit, environment)
    folder = workspace / "runs" / "ahead-killed"
    cut = read_samples(folder / "checkpoints" / "samples" / "step-3.npz")
    assert cut.finished
    resumed = subprocess.run(fit, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert resumed.returncode == 0, resumed.stderr
    assert "going on from" in resumed.stdout

    recorded = RunFolder(folder)
    trained = Counter(place for columns in recorded.columns.values() for place in columns["prompts"])
    assert trained == dict.fromkeys(range(6 * PROMPTS), SAMPLES)
    later = {key: row for step in (4, 5, 6) for key, row in rows(folder, step)}
    for sample in cut.finished:
        np.testing.assert_array_equal(later[sample.result.key]["input_ids"], sample.row["input_ids"])
        np.testing.assert_array_equal(later[sample.result.key]["weight_versions"], sample.row["weight_versions"])
    responses = [tuple(row["input_ids"][row["loss_mask"]]) for row in later.values()]
    for part in cut.partial.values():
        assert tuple(part.ids) in [response[: len(part.ids)] for response in responses]


def rows(folder: Path, step: int) -> Iterator[tuple[tuple[str, int], dict[str, np.ndarray]]]:
    """The tokens of a step's samples, by (uid, sample)."""
    samples = read_step(step_file(folder, step))
    for row, key in enumerate(zip(samples.columns["uid"].tolist(), samples.columns["sample"].tolist(), strict=True)):
        yield key, samples.tokens.row(row)
