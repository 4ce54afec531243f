"""Fit the time model to runs on the same machine.

runs/NAME: config.yaml, timeline.jsonl, metrics.jsonl --> Measured
Measured --balancing.time_model.fitting--> Machine, Efficiency
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from balancing.time_model import Efficiency, Machine, Workload
from balancing.time_model.fitting import Measured, fit
from controller.config import Config
from controller.config.recorded import load_recorded
from controller.observability.run_folder import RunFolder, check_run_folder
from controller.preflight.cluster import Cluster
from controller.preflight.time_inputs import layout_of, recorded_lengths, shape_of
from workers.errors import ConfigError

WARM_UP = 3
"""First steps, which compile and allocate."""
Record = dict[str, Any]


def fit_to_run(folder: Path, machine: Machine) -> tuple[Machine, Efficiency, str]:
    """Return a machine and efficiencies fitted to a run, and a line that says so. Raises as
    `read_measurements`.
    """
    machine, efficiency = fit([read_measurements(folder)], machine)
    errors = ", ".join(
        f"{name} within {share:.0%}" for name, share in efficiency.spread.items()
    )
    return machine, efficiency, f"{machine.name}, fitted to {folder}: {errors}"


def read_measurements(folder: Path) -> Measured:
    """Read what a run of `controller.fit` without staleness shows. Raises ConfigError, or DataError without
    records.
    """
    check_run_folder(folder, "--measured")
    config = load_recorded(folder / "config.yaml")
    if not isinstance(config, Config) or config.rollout.max_staleness:
        raise ConfigError(
            f"--measured {folder}: not a run of controller.fit with rollout.max_staleness=0. Give one."
        )
    run = RunFolder(folder)
    records = [record for record in run.timeline if record["step"] > WARM_UP]
    times = {row["step"]: row for row in run.metrics}
    _, (prompt,) = recorded_lengths(folder)
    gpus = config.training_workers if config.uses_gpus else 0
    layout = layout_of(
        config, Cluster(1, cpus=config.training_workers, gpus=gpus, gpu_gib=80)
    )
    usable_records = [
        record for record in records if record["samples"] and record["micro_steps"]
    ]
    steps = [
        _step(config, record, times[record["step"]], prompt) for record in usable_records
    ]
    return Measured(
        shape_of(config),
        layout,
        np.array(
            [row for record in usable_records for row in _micro_steps(record)], np.float64
        ).reshape(-1, 3),
        [(work, seconds) for work, seconds, _ in steps],
        [times[record["step"]]["time/weights_s"] for record in usable_records],
        [rest for *_, rest in steps],
    )


def _micro_steps(record: Record) -> list[tuple[float, float, float]]:
    rows = [
        row
        for steps in record["micro_steps"].values()
        for row in steps
        if row[0] == "update" and row[3]
    ]
    return [(tokens, squared, end - start) for _, start, end, tokens, squared, *_ in rows]


def _step(
    config: Config, record: Record, times: Record, prompt: int
) -> tuple[Workload, float, float]:
    """Return a step's samples, their seconds, and those outside of engines, micro-steps and
    weight transfers.
    """
    samples = [row for rows in record["samples"].values() for row in rows]
    responses = [max(1, row[2]) for row in samples]
    work = Workload([prompt] * len(samples), responses, config.rollout.samples_per_prompt)
    sampled = max(row[1] for row in samples) - min(row[0] for row in samples)
    computed = max(_seconds_of(steps) for steps in record["micro_steps"].values())
    return (
        work,
        sampled,
        float(times["time/step_s"] - sampled - computed - times["time/weights_s"]),
    )


def _seconds_of(micro_steps: Sequence[Sequence[Any]]) -> float:
    return sum(end - start for _, start, end, *_ in micro_steps)
