"""`python -m ballast replay runs/NAME --step K [key.sub=value ...]`: train a recorded step again.

    checkpoint before it, samples of the steps since
        --training roles--> loss, gradient norm, next to the recorded ones

Needs run.record_samples=true. Overrides such as policy.data_parallel=1 change the layout. Nothing is written
into the run's folder. With --output, the replay is recorded in a folder, for `ballast audit`. Exit codes: see
`controller.fit`.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from balancing import CostModel
from controller.actors.cluster_address import check_address, check_cluster
from controller.checkpoints.progress import FOLDER, checkpoints_at
from controller.config import Config, load_as
from controller.config.conditions import leave_out_cpu_settings
from controller.config.recorded import check_trusted, load_recorded
from controller.config.sections import TrackingConfig
from controller.lifecycle.model_checks import check_models
from controller.lifecycle.session import Session, exit_code, ray_session, session
from controller.lifecycle.user_functions import find_functions, find_step
from controller.observability.run_folder import RunFolder, recorded_steps
from controller.planning.planner import counted_costs
from controller.preflight.arguments import OneLineParser
from controller.preflight.checks import check_layout
from workers.config.roles import RewardModelConfig
from workers.errors import ConfigError, DataError
from workers.model.checkpoint.checkpoint_folder import complete, read_manifest

if TYPE_CHECKING:
    from controller.observability.console import Console
    from controller.run import Run
    from controller.training_loop import Step

SHOWN = (
    "policy/loss",
    "policy/grad_norm",
    "critic/loss",
    "critic/grad_norm",
    "policy/rollout_mismatch_mean",
    "policy/rollout_mismatch_max",
)
ROW = "{:30}{:>16}{:>16}{:>14}"


@dataclass
class ReplayConfig(Config):
    engines = 0


@dataclass(frozen=True)
class Start:
    """checkpoint: None for the run's initial models. steps: to train, the requested one last."""

    checkpoint: Path | None
    steps: range

    def describe(self) -> str:
        *earlier_steps, last = self.steps
        if not earlier_steps:
            return ""
        start = (
            f"the checkpoint of step {earlier_steps[0] - 1}"
            if self.checkpoint
            else "the models that the run began with"
        )
        steps = (
            f"step {earlier_steps[0]} is"
            if len(earlier_steps) == 1
            else f"steps {earlier_steps[0]} to {earlier_steps[-1]} are"
        )
        return f"there is no checkpoint of step {last - 1}: {steps} trained again first, from {start}"


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(partial(_prepare, arguments))


def _prepare(arguments: Sequence[str] | None) -> Callable[[], None]:
    parsed = _parser().parse_intermixed_args(arguments)
    folder: Path = parsed.folder
    run_config = settings(folder, parsed.overrides, trust_run=parsed.trust_run)
    start = start_before(folder, parsed.step, run_config.run.resume)
    output: Path | None = parsed.output
    if output is not None and output.exists():
        raise ConfigError(f"--output={output}: it exists. Name a new folder.")
    config = replay_settings(run_config, start, output)
    recorded = next(
        (row for row in RunFolder(folder).metrics if row["step"] == parsed.step), {}
    )
    check_layout(config)
    check_models(config)
    check_address(config)
    check_cluster(config)
    return partial(run, config, folder, start, recorded, output)


def settings(
    folder: Path, overrides: Sequence[str] = (), *, trust_run: bool = False
) -> Config:
    """Read a run's recorded settings, with the overrides. Raises DataError and ConfigError."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise DataError(f"{folder} is not the folder of a run: it has no config.yaml.")
    if not isinstance(load_recorded(path), Config):
        raise ConfigError(
            f"{folder} trained on given sequences. Only runs of controller.fit are replayed."
        )
    for override in overrides:
        if override.startswith("rollout.sampling."):
            raise ConfigError(
                f"{override}: samples and log-probs come from the run. Leave it out."
            )
    config = load_as(ReplayConfig, path, overrides)
    leave_out_cpu_settings(config)
    if not trust_run:
        loss = config.algorithm.loss.function
        advantage_function = config.algorithm.advantage_function
        code = [loss, advantage_function, config.run.step, config.batch.replay.by]
        check_trusted(folder, code, overrides, "add --trust-run")
    return config


def start_before(folder: Path, step: int, resume: str) -> Start:
    """Find the nearest checkpoint before the step. Raises DataError if it or a step's record is missing."""
    checkpoints = {path: manifest.step for path, manifest in complete(folder / FOLDER)}
    began_elsewhere = resume not in ("never", "auto")
    if began_elsewhere:
        checkpoints |= {
            path: read_manifest(path).step for path in checkpoints_at(Path(resume))
        }
    earlier_checkpoints = {
        path: number for path, number in checkpoints.items() if number < step
    }
    if began_elsewhere and not earlier_checkpoints:
        raise DataError(
            f"{folder} began at run.resume={resume}, where there is no checkpoint before step {step}."
        )
    checkpoint = max(earlier_checkpoints, key=earlier_checkpoints.__getitem__, default=None)
    steps = range(earlier_checkpoints[checkpoint] + 1 if checkpoint else 1, step + 1)
    _check_recorded(folder, step, steps)
    return Start(checkpoint, steps)


def _check_recorded(folder: Path, step: int, steps: range) -> None:
    sampled_steps = recorded_steps(folder)
    if step not in sampled_steps:
        hint = (
            f"it has steps {sampled_steps[0]} to {sampled_steps[-1]}"
            if sampled_steps
            else "run.record_samples=true keeps them"
        )
        raise DataError(f"{folder} has no samples of step {step}; {hint}.")
    for missing in sorted(set(steps) - set(sampled_steps))[:1]:
        raise DataError(
            f"{folder} has no samples of step {missing}, and no checkpoint between it and step {step}: "
            "run.checkpoint_every writes them."
        )


def replay_settings(config: Config, start: Start, output: Path | None = None) -> Config:
    """Return the replay's settings: load the checkpoint, without sampling, scoring or saving. output: folder
    of a recorded replay.
    """
    resume = str(start.checkpoint) if start.checkpoint else "never"
    run = replace(
        config.run, record_samples=output is not None, save_every=0, checkpoint_every=0
    )
    run = replace(run, resume=resume, on_data_change="keep_place")
    reward = replace(config.reward, model=RewardModelConfig())  # samples have their rewards
    return replace(
        config,
        run=run,
        reward=reward,
        tracking=TrackingConfig(tensorboard=False, timeline=False),
    )


def run(
    config: Config,
    folder: Path,
    start: Start,
    recorded: Mapping[str, float | None],
    output: Path | None = None,
) -> None:
    from controller.observability.console import Console

    console = Console(verbose=True)
    if description := start.describe():
        console.log(description)
    with ray_session(config, console):
        replayed = replay(config, folder, start.steps, console, output)
    print("\n".join(comparison(recorded, replayed)))


def replay(
    config: Config,
    folder: Path,
    steps: Iterable[int],
    console: "Console",
    output: Path | None = None,
) -> dict[str, float]:
    """Train a run's steps again on a connected Ray, from the state of run.resume, and return the last one's
    metrics.

    folder: of the recorded run. The replay writes to `output`, or to a temporary folder. Raises as
    `find_step`, `launch` and `train_again`.
    """
    from controller.step import step_of

    make_step = step_of(find_step(config) if config.run.step else b"")
    cost_model = counted_costs(config)
    with tempfile.TemporaryDirectory(prefix="ballast-replay-") as written:
        place = output or Path(written, f"{config.run.name}-replay")
        config = replace(
            config, run=replace(config.run, dir=str(place.parent), name=place.name)
        )
        roles = {"only": config.training_roles, "total_steps": config.total_optimizer_steps}
        with session(config, console, {}, **roles) as started:
            return train_again(
                open_recorded_run(config, started, folder, cost_model), steps, make_step
            )


def open_recorded_run(
    config: Config, started: Session, folder: Path, cost_model: CostModel
) -> "Run":
    """Return a run that reads its samples from `folder`, and logs where engines and trainer differ."""
    from ballast.replay.recorded_buffer import RecordedBuffer, RecordedPrompts
    from controller.algorithm.logprob_check import LogProbCheck
    from controller.run import Run

    prompts = RecordedPrompts(config.data.prompt_key)
    buffer = partial(RecordedBuffer, folder)
    functions = find_functions(
        config, settings=["algorithm.advantage_function", "batch.replay.by"]
    )
    run = Run(
        config,
        started,
        prompts,
        None,
        cost_model=cost_model,
        buffer=buffer,
        functions=functions,
    )
    run.logprob_check = LogProbCheck(config, run.weight_version, started.record.console.log)
    return run


def train_again(run: "Run", steps: Iterable[int], make_step: "Step") -> dict[str, float]:
    """Make the steps and return the last one's metrics. Raises DataError as `read_step`, and errors of a
    step.
    """
    from controller.training_loop import end_step

    for number in steps:
        with run.record.step(number, run.last_step):
            make_step(run)
            run.step_finished()
        end_step(run, {})
    return run.record.metrics


def comparison(
    recorded: Mapping[str, float | None], replayed: Mapping[str, float]
) -> list[str]:
    """Tabulate the metrics in SHOWN that either step has. Null in metrics.jsonl means not finite."""
    lines = [ROW.format("metric", "recorded", "replayed", "difference")]
    for name in SHOWN:
        if name in recorded or name in replayed:
            recorded_value, now = (_number(values, name) for values in (recorded, replayed))
            both = recorded_value is not None and now is not None
            difference = f"{now - recorded_value:.1e}" if both else "-"  # type: ignore[operator]
            lines.append(ROW.format(name, _shown(recorded_value), _shown(now), difference))
    return lines


def _number(metrics: Mapping[str, float | None], name: str) -> float | None:
    """NaN for null, None if missing."""
    value = metrics.get(name, None)
    return math.nan if value is None and name in metrics else value


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m ballast replay",
        usage="python -m ballast replay runs/NAME --step K [--output FOLDER] [--trust-run] "
        "[key.sub=value ...]",
        description="Train a step of a run again, on the samples that it recorded (run.record_samples=true).",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="runs/NAME", help="folder of the run")
    parser.add_argument(
        "--step", type=int, required=True, metavar="K", help="the step, from 1"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="record the replay here, for `ballast audit`",
    )
    parser.add_argument(
        "--trust-run",
        action="store_true",
        help="run the loss function and the step that the run's settings name",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.sub=value",
        help="settings that replace the run's",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
