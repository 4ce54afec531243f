"""`python -m controller.fit` in a shell: a killed run goes on as if it had not been, and can be stopped."""

import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from controller.observability.run_folder import step_file
from controller.rollout.sample_files import read_samples, read_step
from tests.end_to_end.processes import (
    ROOT,
    Stopped,
    marked_environment,
    settings_file,
    stopped,
)
from tests.json_lines import read_lines
from workers.model.checkpoint.checkpoint_folder import complete

PROMPTS, SAMPLES = 5, 3  # of a step, of a prompt


def command(settings: list[str], workspace: Path, name: str) -> list[str]:
    fit = [sys.executable, "-m", "controller.fit", *settings_file(workspace), *settings]
    fit += [f"run.name={name}", "run.checkpoint_every=3", "run.resume=auto"]
    return [*fit, "batch.mini_batches=2", "policy.optimizer.learning_rate=1e-3"]


def kill_after(begin: str, fit: list[str], environment: dict[str, str]) -> None:
    """Start the command, and kill its driver when it has said a line that begins so."""
    killed = stopped(signal.SIGKILL, begin, fit, environment)
    assert (killed.code, killed.left) == (-signal.SIGKILL, [])


@dataclass(frozen=True)
class Resumed:
    """before: the lines of metrics.jsonl when the run had been killed; after: when it had been stopped as
    well.
    """

    folder: Path
    before: list[dict]
    again: Stopped
    after: list[dict]


@pytest.fixture(scope="module")
def resumed(settings: list[str], workspace: Path) -> Resumed:
    """Killed after step 5 and begun again, a run is stopped by Ctrl-C after its step 6."""
    environment, folder = marked_environment(), workspace / "runs" / "killed"
    fit = [
        *command(settings, workspace, "killed"),
        "run.steps=1000",
        "policy.data_parallel=1",
    ]
    kill_after("step    5/", fit, environment)
    before = read_lines(folder / "metrics.jsonl")
    again = stopped(signal.SIGINT, "step    6/", fit, environment)
    return Resumed(folder, before, again, read_lines(folder / "metrics.jsonl"))


def test_a_killed_run_goes_on_as_if_it_had_not_been(resumed: Resumed) -> None:
    """It goes on from the checkpoint of step 3: steps 4 and 5 come again and are the same."""
    assert any("going on from" in line and "step-3" in line for line in resumed.again.said)
    assert [line[:9] for line in resumed.again.said if line.startswith("step ")] == [
        f"step    {s}" for s in (4, 5, 6)
    ]
    assert [record["step"] for record in resumed.after] == list(range(len(resumed.after)))
    for first, second in zip(resumed.before[:6], resumed.after[:6], strict=True):
        for name in (
            "reward/mean",
            "rollout/response_tokens_mean",
            "rollout/weight_version",
            "validation/reward",
        ):
            assert first.get(name) == second.get(name), (first["step"], name)
        for name in ("policy/loss", "policy/learning_rate"):
            assert first.get(name) == pytest.approx(second.get(name), abs=1e-6)


def test_a_run_stopped_by_ctrl_c_says_so_and_leaves_a_checkpoint_and_no_process(
    resumed: Resumed,
) -> None:
    check_stopped(resumed.again, resumed.folder, "step    6/1000")


def test_a_local_run_listens_on_this_machine_alone(resumed: Resumed) -> None:
    """Ray, its workers and agents, ranks and engines."""
    assert len(resumed.again.listening) > 5
    outside = [
        found
        for found in resumed.again.listening
        if not found[1].endswith(("127.0.0.1", "::1"))
    ]
    assert outside == []


def check_stopped(found: Stopped, folder: Path, last_said: str) -> None:
    assert found.code == 1, found.errors
    stopped_at = [
        line
        for line in found.errors.splitlines()
        if line.startswith("stopped: run.resume=auto resumes from ")
    ]
    assert len(stopped_at) == 1, found.errors
    assert re.match(last_said + r"  .*reward \d\.\d+", found.said[-1])
    assert found.left == []
    last = read_lines(folder / "metrics.jsonl")[-1]["step"]
    assert [path.name for path, _ in complete(folder / "checkpoints" / "policy")][
        -1
    ] == f"step-{last}"


@pytest.mark.slow  # tests/controller/rollout/test_async_buffer.py has the rules
def test_a_killed_run_that_generates_ahead_trains_every_prompt_once_on_the_tokens_that_it_had(
    settings: list[str], workspace: Path
) -> None:
    """Killed after step 5, it goes on from the checkpoint of step 3 with the samples that no step had trained
    on.
    """
    environment, fit = marked_environment(), command(settings, workspace, "ahead-killed")
    fit += [
        "run.steps=6",
        "rollout.max_staleness=2",
        "rollout.sampling.max_new_tokens=64",
        "run.record_samples=true",
    ]
    fit += ["policy.max_tokens_per_micro_batch=256", "policy.optimizer.learning_rate=1e-4"]
    kill_after("step 5", fit, environment)
    folder = workspace / "runs" / "ahead-killed"
    cut = read_samples(folder / "checkpoints" / "samples" / "step-3.npz")
    assert cut.finished
    resumed = subprocess.run(fit, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert resumed.returncode == 0, resumed.stderr
    assert "going on from" in resumed.stdout

    recorded = read_lines(folder / "lengths.jsonl")
    trained = Counter(place for row in recorded for place in row["prompts"])
    assert trained == dict.fromkeys(range(6 * PROMPTS), SAMPLES)
    later = {key: row for step in (4, 5, 6) for key, row in rows(folder, step)}
    for sample in cut.finished:
        (row,) = sample.rows
        for name in ("input_ids", "weight_versions"):
            np.testing.assert_array_equal(later[sample.result.key][name], row[name])
    responses = [tuple(row["input_ids"][row["loss_mask"]]) for row in later.values()]
    for part in cut.partial.values():
        assert tuple(part.ids) in [response[: len(part.ids)] for response in responses]


def rows(
    folder: Path, step: int
) -> Iterator[tuple[tuple[str, int], dict[str, np.ndarray]]]:
    """The tokens of a step's samples, by (uid, sample)."""
    rollout = read_step(step_file(folder, step), put=lambda block: block)
    for key, (block, _, row) in zip(
        rollout.by_sample, rollout.samples.tokens["input_ids"], strict=True
    ):
        yield key, block.row(row)
