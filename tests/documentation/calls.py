"""The calls of `ballast` that the pages make: all is done up to the start, and what would come out is made
up.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ballast
from controller.algorithm.validation_metrics import Interval
from controller.config import Config, to_yaml
from controller.config.python_rewards import GivenFunctions
from controller.config.sampler import SamplerConfig
from controller.lifecycle.inputs import try_inputs
from controller.preflight.checks import check
from controller.sampling.jobs import JobRequest, describe_job

METRICS = {"step": 1, "reward/mean": 0.0, "validation/reward": 0.0}
SUMMARY = {"steps": 1, "validation": {"before": {"reward": 0.0}, "after": {"reward": 0.5}}}


def tried(
    config: Config,
    given: GivenFunctions,
    callbacks: Sequence[Callable[..., None]],
    step: object,
) -> Callable[[], None]:
    """In place of `controller.fit.prepare`: the settings and the rewards are tried, the callbacks called."""
    del step
    check(config, given)
    try_inputs(config, call_functions=given)
    config.run_folder.mkdir(parents=True, exist_ok=True)
    (config.run_folder / "config.yaml").write_text(to_yaml(config))

    def start() -> None:
        for callback in callbacks:
            view = ballast.RunView(
                config.run_folder, Path(config.model.path), [{"response": ""}]
            )
            callback(1, dict(METRICS), view)
            with pytest.raises(ballast.StopTraining):
                callback(20, dict(METRICS), view)

    return start


def sampled(
    schema: type[SamplerConfig], finish: object, request: JobRequest
) -> tuple[Any, Callable[[], object]]:
    """In place of `controller.sampling.sampling_run.prepare_job`."""
    del finish
    describe_job(schema, request)
    return SimpleNamespace(run_folder=Path()), lambda: Path("samples.jsonl").write_text(
        '{"response_tokens": 3}\n'
    )


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put these in their places."""
    monkeypatch.setattr("controller.fit.prepare", tried)
    monkeypatch.setattr(
        "ballast.training.Result.read",
        lambda folder: ballast.Result(folder, SUMMARY, [METRICS]),
    )
    monkeypatch.setattr("ballast.sampling_commands.functions.prepare_job", sampled)
    found = ballast.Evaluation(
        Path(), {"pass@8": 0.5}, {"pass@8": Interval(0.4, 0.6, "wilson")}, {}
    )
    monkeypatch.setattr(
        "ballast.sampling_commands.functions.Evaluation.read", lambda folder: found
    )
