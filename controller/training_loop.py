"""Run the loop of all training commands, on the base class of every run.

begin --> validate --> step --> validate, callbacks, records, checkpoint, each when due --> save the model
                        ^                                                        |
                        '--------------------- next step <----------------------'
"""

import inspect
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from balancing import CostModel
from balancing.basics.compiled import telling_of_compilation
from controller.checkpoints.checkpoint_writer import CheckpointWriter
from controller.checkpoints.peer_copies import copies_of
from controller.checkpoints.progress import Progress
from controller.config import Config
from controller.config.offline import OfflineConfig
from controller.lifecycle.interrupts import Interrupts
from controller.lifecycle.model_card import write_card
from controller.lifecycle.session import Session
from controller.planning.cost_model_fitting import (
    CostModelFitter,
    over_stages,
    seconds_of_stages,
)
from controller.planning.planner import Planner
from workers.batch.metrics import add_prefix
from workers.errors import ConfigError

Settings = TypeVar("Settings", bound=Config | OfflineConfig)

Step = Callable[[Any], None]
"""Makes one step of a `TrainingRun`."""

Callback = Callable[..., None]
"""Called as `f(step, metrics)` or `f(step, metrics, view)` after every step, and with step 0 after a
validation before the first. Numbers that it adds to `metrics`, a dictionary, are recorded with the step's.
view: a `RunView`.
"""


class StopTraining(Exception):  # noqa: N818 - no error, as StopIteration is none
    """Raised by a callback to end the run normally after this step, with its model and summary."""


@dataclass(frozen=True)
class RunView:
    """The run, for callbacks.

    model: folder of the policy saved last, or model.path. samples: the step's, a dictionary each: prompt,
    record, response, reward, response_tokens and others.
    """

    folder: Path
    model: Path
    samples: list[dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """Result of a run. before, after: validation metrics. steps: metrics of this process's steps."""

    before: dict[str, float]
    after: dict[str, float]
    steps: tuple[dict[str, float], ...]
    last_step: int

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json, with medians over steps for seconds and tokens/s."""
        speed = {}
        if self.steps:
            speed = {
                "seconds_per_step": statistics.median(
                    step["time/step_s"] for step in self.steps
                ),
                "tokens_per_second": statistics.median(
                    step["throughput/tokens_per_s"] for step in self.steps
                ),
            }
        validation = {"before": self.before, "after": self.after}
        return {"steps": self.last_step, "validation": validation} | speed


class TrainingRun(ABC, Generic[Settings]):
    """A run in progress. Steps read it, and change its models through their parts.

    record: receives events, and cannot change them. planner: assigns sequences to ranks. progress: state
    after the last complete step, replaced only by `end_step`. last_step: number of steps.
    """

    def __init__(
        self, config: Settings, session: Session, *, steps: int, cost_model: CostModel
    ) -> None:
        """cost_model: FLOPs of a sequence, used for plans until measured times replace it."""
        self.config = config
        self.roles = session.roles
        self.record = session.record
        self.progress = session.progress
        self.last_step = steps
        self.model = Path(config.model.path)
        self.cost_fitter = CostModelFitter(cost_model, enabled=config.refits_cost_model)
        self.cost_fitter.load_state(self.progress.refit)
        self.planner = Planner(config, self.cost_fitter.cost_model, self.cost_fitter.stages)
        self.folder = session.record.writer.folder.resolve()
        log = session.record.console.log
        self.interrupts = Interrupts(log)
        self.checkpoints = CheckpointWriter(
            session.roles, self.folder, config.run.keep_checkpoints, log
        )

    @property
    def number(self) -> int:
        """Step in progress, from 1."""
        return self.progress.step + 1

    @abstractmethod
    def validate(self, step: int) -> dict[str, float]:
        """Validate the policy, and record, show and return the result, empty without held-out data."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the `Progress` fields that this kind of step changes."""

    @abstractmethod
    def measure(self) -> dict[str, float]:
        """Return metrics of a complete step, in addition to its parts'."""

    def begin(self) -> None:
        """Prepare for the first validation, or the first step of a resumed run."""

    def step_finished(self) -> None:
        """Fit the next plans' cost model to this step's micro-steps."""
        times = self.roles.take_micro_step_times()
        fitter = self.cost_fitter
        self.record.micro_steps(times, self.planner.cost_model)
        policy = {
            actor: actor_times
            for actor, actor_times in times.items()
            if actor.startswith("policy")
        }
        self.record.add(
            add_prefix(
                "balance", fitter.observe(over_stages(policy), seconds_of_stages(policy))
            )
        )
        self.planner.cost_model, self.planner.stages = fitter.cost_model, fitter.stages

    def save_beside(self, checkpoint: Path, progress: Progress) -> None:
        """Write a checkpoint's files besides models and `progress`, before the models are saved."""

    def save_models(self) -> None:
        self.save("model")

    def save(self, name: str) -> None:
        """Save model and tokenizer in Hugging Face format as `name`, and LoRA adapters: `model-30`,
        `adapters-30`.
        """
        with self.record.phase("save"):
            self.model = self.folder / name
            self.roles.policy.save_pretrained(str(self.model))
            write_card(self.config, self.model)
            if self.config.model.lora.rank:
                self.roles.policy.save_adapters(
                    str(self.folder / name.replace("model", "adapters", 1))
                )


def train(run: TrainingRun[Any], step: Step, callbacks: Sequence[Callback] = ()) -> Outcome:
    """Validate, make all remaining steps, validate, save the model and write summary.json.

    An interrupt leaves a checkpoint of the last complete step, if run.checkpoint_every is set. An exception
    in a callback ends the run after the step is recorded and saved, see `StopTraining`.
    """
    tell = partial(run.record.console.note, "compiling the planner, once")
    rows, run.record.shows_all = list[dict[str, float]](), any(map(takes_run, callbacks))
    with run.interrupts, telling_of_compilation(tell):
        try:
            run.begin()
            try:
                if not run.progress.step:
                    _before_first_step(run, callbacks)
                for number in range(run.number, run.last_step + 1):
                    with run.record.step(number, run.last_step):
                        step(run)
                        run.step_finished()
                    metrics = run.measure()
                    rows.append(run.record.metrics)
                    end_step(
                        run, metrics, callbacks, validates=_validation_is_due(run, number)
                    )
            except StopTraining:
                run.record.console.log(
                    f"a callback has ended the run after step {run.progress.step}"
                )
            run.save_models()
            if run.config.run.checkpoint_every:
                run.checkpoints.finish()
        except KeyboardInterrupt:
            if run.config.run.checkpoint_every and not run.interrupts.held:
                run.checkpoints.at_stop(run.progress, run.save_beside)
            raise
    run.record.write_timeline(run.progress.step)
    outcome = Outcome(
        run.progress.before, run.progress.latest, tuple(rows), run.progress.step
    )
    run.record.writer.summary(outcome.summary())
    return outcome


def _before_first_step(run: TrainingRun[Any], callbacks: Sequence[Callback]) -> None:
    scores = run.validate(0) if run.config.validation.at_start else {}
    run.record.add(add_prefix("validation", scores))
    raised = _call(run, 0, callbacks) if scores else None
    _advance(run, 0, scores)
    run.record.writer.step(0, run.record.metrics)
    run.record.write_timeline(0)
    if raised is not None:
        raise raised


def _validation_is_due(run: TrainingRun[Any], number: int) -> bool:
    every = run.config.validation.every
    return number == run.last_step or bool(every and number % every == 0)


def end_step(
    run: TrainingRun[Any],
    metrics: dict[str, float],
    callbacks: Sequence[Callback] = (),
    *,
    validates: bool = False,
) -> None:
    """Record a step that was made, and save what is due. Training, replay and a loop of one's own call it.

    metrics: of the whole step, added to those of its parts. validates: whether to validate first. Raises the
    exception of a callback, once the step is recorded and saved.
    """
    number = run.number
    run.record.add(metrics | {"checkpoint/failures": float(run.checkpoints.failures)})
    scores = run.progress.latest
    if validates:
        scores = run.validate(number)
        run.record.add(add_prefix("validation", scores))
    raised = _call(run, number, callbacks)
    run.record.end_step(number, run.last_step)
    _advance(run, number, scores)
    _save_what_is_due(run, number)
    run.record.write_timeline(number)
    run.interrupts.release()
    if raised is not None:
        raise raised


def _advance(run: TrainingRun[Any], step: int, scores: dict[str, float]) -> None:
    """Set `run.progress` to the state after `step`. scores: of the last validation."""
    scores_before = run.progress.before if step else scores
    state = run.state()
    refit = run.cost_fitter.state()
    run.progress = replace(
        run.progress, step=step, before=scores_before, latest=scores, refit=refit, **state
    )


def _save_what_is_due(run: TrainingRun[Any], step: int) -> None:
    settings = run.config.run
    if settings.save_every and step % settings.save_every == 0:
        run.save(f"model-{step}")
    if settings.checkpoint_every and step % settings.checkpoint_every == 0:
        with run.record.phase("checkpoint"):
            run.checkpoints.begin(run.progress, run.save_beside)
    if settings.peer_copies and step % settings.peer_copies == 0:
        with run.record.phase("peer copies"):
            copies_of(run.folder).begin(run.roles, run.progress, run.record.console.log)


def _call(
    run: TrainingRun[Any], step: int, callbacks: Sequence[Callback]
) -> Exception | None:
    """Call the callbacks, record their numbers, and return the exception of a callback."""
    view = None
    try:
        for callback in callbacks:
            metrics: dict[str, Any] = dict(run.record.metrics)
            try:
                if takes_run(callback):
                    view = view or RunView(run.folder, run.model, run.record.all_samples())
                    callback(step, metrics, view)
                else:
                    callback(step, metrics)
            finally:
                run.record.add(
                    {name: as_metric(name, value) for name, value in metrics.items()}
                )
    except Exception as error:
        return error
    return None


def takes_run(callback: Callback) -> bool:
    """Whether a callback takes a third argument. Raises ConfigError unless it takes two or three."""
    if callable(callback):
        for count in (3, 2):
            with suppress(TypeError, ValueError):  # ValueError: it has no signature
                inspect.signature(callback).bind(*range(count))
                return count == 3
    raise ConfigError(
        f"callbacks={callback!r}: not a function of (step, metrics) or (step, metrics, view). Change it."
    )


def as_metric(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ConfigError(
            f"callbacks: metrics[{name!r}]={value!r:.80} is not a number. Add numbers alone."
        ) from None
