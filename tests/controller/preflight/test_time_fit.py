"""What a run's records show to the time model."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from balancing.time_model import MACHINES
from controller.config import Config, load, to_yaml
from controller.preflight.time_fit import WARM_UP, fit_to_run, read_measurements
from tests.refusals import refused

SAMPLES = {
    "rollout 0": [[10.0, 12.0, 30, 4], [10.1, 13.0, 50, 4]],
    "rollout 1": [[10.0, 14.0, 70, 4]],
}
MICRO_STEPS = {
    "policy dp=0": [
        ["log_probs", 15.0, 15.5, 90, 900],
        ["update", 16.0, 17.0, 100, 1000],
        ["update", 17.0, 17.5, 40, 300],
    ],
    "policy dp=1": [["update", 16.0, 18.0, 200, 4000], ["update", 18.0, 18.1, 0, 0]],
}


def write_run(workspace: Path, steps: int = 12) -> Path:
    """The records of a run whose steps are all the same."""
    folder = workspace / "runs/fitted"
    folder.mkdir(parents=True)
    config = load("config.yaml")
    (folder / "config.yaml").write_text(to_yaml(config))
    numbers = range(1, steps + 1)
    records = {
        "timeline.jsonl": {
            "samples": SAMPLES,
            "micro_steps": MICRO_STEPS,
            "weights": {},
            "phases": [],
            "cost": [1, 0, 0, 0],
        },
        "metrics.jsonl": {
            "time/step_s": 8.0,
            "time/weights_s": 0.25,
            "rollout/response_tokens_mean": 50.0,
        },
        "lengths.jsonl": {"lengths": [34, 54, 74]},
    }
    for name, row in records.items():
        (folder / name).write_text(
            "".join(f"{json.dumps({'step': step} | row)}\n" for step in numbers)
        )
    return folder


def test_a_run_shows_micro_steps_generations_and_the_rest(workspace: Path) -> None:
    found, counted = read_measurements(write_run(workspace)), 12 - WARM_UP
    # Without log-probs and the one without tokens.
    assert len(found.micro_steps) == 3 * counted
    assert np.array_equal(
        found.micro_steps[:3], [[100, 1000, 1.0], [40, 300, 0.5], [200, 4000, 2.0]]
    )
    work, seconds = found.generations[0]
    assert (seconds, sorted(work.responses), set(work.prompts)) == (4.0, [30, 50, 70], {4})
    assert found.transfers == [0.25] * counted
    assert found.rest == pytest.approx([8.0 - 4.0 - 2.1 - 0.25] * counted)


def test_a_fitted_machine_needs_as_long_as_the_run(workspace: Path) -> None:
    machine, efficiency, told = fit_to_run(write_run(workspace), MACHINES["cpu"])
    assert machine.transfer < 0.26
    assert machine.phase == pytest.approx((8.0 - 4.0 - 2.1 - 0.25) / 3, rel=0.35)
    assert efficiency.spread["overheads"] == 0.3
    assert "fitted to" in told


def test_runs_that_generate_ahead_are_refused(workspace: Path) -> None:
    folder = write_run(workspace)
    config: Config = load(folder / "config.yaml")
    config.rollout = replace(config.rollout, max_staleness=1)
    (folder / "config.yaml").write_text(to_yaml(config))
    with refused(f"--measured {folder}: "):
        read_measurements(folder)
