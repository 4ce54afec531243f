"""The loop that all training commands share: everything before, between and after steps.

weights to who samples | validate --> step, step, ... --> model
                                       each: metrics --> console, trackers --> what is due: validation, checkpoint
"""

import inspect
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from balancing import CostModel
from balancing.compiled import telling_of_compilation
from controller.checkpoint import Progress
from controller.checkpoint_writer import CheckpointWriter
from controller.config import TrainingConfig
from controller.cost_model_fitting import CostModelFitter, over_stages, seconds_of_stages
from controller.interrupts import Interrupts
from controller.model_card import write_card
from controller.planner import Planner
from controller.session import Session
from workers.errors import ConfigError
from workers.model.timing import MicroStepTime

Callback = Callable[..., None]
"""Called as `f(step, metrics)` or `f(step, metrics, view)` after every step, and with step 0 after a validation before
the first. Numbers that it adds to `metrics`, a dictionary, are recorded with the step's. view: a `RunView`."""


class StopTraining(Exception):  # noqa: N818 - no error, as StopIteration is none
    """Raised by a callback: the run ends after this step as after its last one, with its model and its summary."""


@dataclass(frozen=True)
class RunView:
    """The run, for callbacks. folder: runs/NAME. model: the folder of the policy saved last, or model.path. samples: of
    the step, a dictionary each: prompt, record, response, reward, response_tokens and others; none where none are made.
    """

    folder: Path
    model: Path
    samples: list[dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """The result of a run. before, after: validation metrics. steps: metrics of the steps that this process made.
    last_step: the number of the last one."""

    before: dict[str, float]
    after: dict[str, float]
    steps: tuple[dict[str, float], ...]
    last_step: int

    def summary(self) -> dict[str, Any]:
        """The numbers of summary.json; seconds and tokens/s are medians over steps."""
        speed = {}
        if self.steps:
            speed = {
                "seconds_per_step": statistics.median(step["time/step_s"] for step in self.steps),
                "tokens_per_second": statistics.median(step["throughput/tokens_per_s"] for step in self.steps),
            }
        validation = {"before": self.before, "after": self.after}
        return {"steps": self.last_step, "validation": validation} | speed


class TrainingLoop(ABC):
    """Steps, and around them interrupts, checkpoints, the timeline and the cost model that plans follow."""

    def __init__(
        self,
        config: TrainingConfig,
        session: Session[Any],
        *,
        steps: int,
        validate_every: int,
        validate_at_start: bool,
        cost_model: CostModel,
    ) -> None:
        """steps: of the whole run. validate_every: 0 validates before and after training alone, or after it, without
        validate_at_start. cost_model: FLOPs of a sequence, which the plan balances."""
        self._config, self._run, self.last_step = config, config.run, steps
        self._validate_every, self._validate_at_start = validate_every, validate_at_start
        self._policy, self._lora = session.roles.policy, bool(config.model.lora.rank)
        self._model = Path(config.model.path)
        self.record, self.progress = session.record, session.progress
        self.complete = replace(self.progress)  # as it was after the last complete step
        self.cost_fitter = CostModelFitter(cost_model, enabled=config.refits_cost_model)
        self.cost_fitter.load_state(self.progress.refit)
        self.planner = Planner(config, self.cost_fitter.cost_model, self.cost_fitter.stages)
        self.folder, log = session.record.writer.folder.resolve(), session.record.console.log
        self.interrupts = Interrupts(log)
        self.checkpoints = CheckpointWriter(session.roles, self.folder, config.run.keep_checkpoints, log)

    @abstractmethod
    def step(self, step: int) -> dict[str, float]:
        """Make one step and return its metrics. Calls `interrupts.hold` before the first change of a model."""

    @abstractmethod
    def validate(self, step: int) -> dict[str, float]:
        """Measure the policy on held-out data, record and show it; empty where there is none."""

    def fit(self, callbacks: Sequence[Callback] = ()) -> Outcome:
        """Validate, train for all steps, validate, write summary.json; or do what is left of that.

        An interrupt leaves a checkpoint of the last complete step, where run.checkpoint_every writes any.
        callbacks: see `Callback`. What one raises ends the run when the step is recorded and saved, see `StopTraining`.
        """
        tell = partial(self.record.console.say, "compiling the planner, once")
        with self.interrupts, telling_of_compilation(tell):
            try:
                outcome = self._train(callbacks)
            except KeyboardInterrupt:
                if self._run.checkpoint_every and not self.interrupts.held:
                    self.checkpoints.at_stop(self.complete, self.save_beside)
                raise
        self.record.writer.summary(outcome.summary())
        return outcome

    def _train(self, callbacks: Sequence[Callback]) -> Outcome:
        """All steps of `fit`, which adds the handling of interrupts."""
        progress, steps = self.progress, list[dict[str, float]]()
        self.begin()
        try:
            if not progress.step:
                self._validate_before(callbacks)
            for step in range(progress.step + 1, self.last_step + 1):
                raised = self._complete_step(step, steps, callbacks)
                if raised is not None:
                    raise raised
        except StopTraining:
            self.record.console.log(f"a callback has ended the run after step {progress.step}")
        self.save_models()
        if self._run.checkpoint_every:
            self.checkpoints.finish()
        self.record.write_timeline(progress.step)
        return Outcome(progress.before, progress.latest, tuple(steps), progress.step)

    def _validate_before(self, callbacks: Sequence[Callback]) -> None:
        """The validation before the first step."""
        progress = self.progress
        progress.before = progress.latest = self.validate(0) if self._validate_at_start else {}
        metrics = prefixed("validation", progress.before)
        raised = self._call(callbacks, 0, metrics) if metrics else None
        self.record.writer.step(0, metrics)
        self.record.write_timeline(0)
        if raised is not None:
            raise raised

    def _complete_step(
        self, step: int, steps: list[dict[str, float]], callbacks: Sequence[Callback]
    ) -> Exception | None:
        """Make a step and what is due after it, add its metrics to `steps`, and return what a callback raised."""
        progress, last = self.progress, self.last_step
        metrics = self.step(step)
        if step == last or (self._validate_every and step % self._validate_every == 0):
            progress.latest = self.validate(step)
            metrics |= prefixed("validation", progress.latest)
        progress.step = step
        raised = self._call(callbacks, step, metrics)
        steps.append(metrics)
        self.record.end_step(step, last, metrics)
        self.complete = replace(progress)
        self.save_what_is_due(step)
        self.record.write_timeline(step)
        self.interrupts.release()
        return raised

    def _call(self, callbacks: Sequence[Callback], step: int, metrics: dict[str, float]) -> Exception | None:
        """Call the callbacks, add their numbers to `metrics`, and return what one raised.

        Called before the step is recorded, so that its record has their numbers.
        """
        view = None
        try:
            for callback in callbacks:
                given: dict[str, Any] = dict(metrics)
                try:
                    if takes_run(callback):
                        view = view or RunView(self.folder, self._model, self.samples())
                        callback(step, given, view)
                    else:
                        callback(step, given)
                finally:
                    metrics |= {name: as_metric(name, value) for name, value in given.items()}
        except Exception as error:
            return error
        return None

    def samples(self) -> list[dict[str, Any]]:
        """The samples of the last step, for callbacks."""
        return []

    def begin(self) -> None:  # noqa: B027 - optional
        """Called before the first validation, or before the first step of a run that resumes."""

    def save_beside(self, checkpoint: Path, progress: Progress) -> None:  # noqa: B027 - optional
        """Called before a checkpoint of the policy is begun: write what else the run needs to go on from it."""

    def save_models(self) -> None:
        """Called after the last step."""
        self.save("model")

    def compare_with_plan(self, times: Mapping[str, Sequence[MicroStepTime]]) -> dict[str, float]:
        """Record the times of micro-steps, by actor, and fit the cost model of the next plans to them."""
        self.record.micro_steps(times, self.planner.cost_model)
        policy = {actor: found for actor, found in times.items() if actor.startswith("policy")}
        fitter = self.cost_fitter
        error = fitter.observe(over_stages(policy), seconds_of_stages(policy))
        self.planner.cost_model, self.planner.stages, self.progress.refit = (
            fitter.cost_model,
            fitter.stages,
            fitter.state(),
        )
        return prefixed("balance", error)

    def save_what_is_due(self, step: int) -> None:
        """Save a model or a checkpoint if one is due after this step."""
        if self._run.save_every and step % self._run.save_every == 0:
            self.save(f"model-{step}")
        if self._run.checkpoint_every and step % self._run.checkpoint_every == 0:
            with self.record.phase("checkpoint"):
                self.checkpoints.begin(self.complete, self.save_beside)

    def save(self, name: str) -> None:
        """Save model and tokenizer in Hugging Face format as `name` in the run's folder, and LoRA adapters beside it:
        `model-30`, `adapters-30`."""
        with self.record.phase("save"):
            self._model = self.folder / name
            self._policy.save_pretrained(str(self._model))
            write_card(self._config, self._model)
            if self._lora:
                self._policy.save_adapters(str(self.folder / name.replace("model", "adapters", 1)))


def takes_run(callback: Callback) -> bool:
    """Whether a callback takes a third argument. Raises ConfigError for what does not take two or three."""
    if callable(callback):
        for count in (3, 2):
            with suppress(TypeError, ValueError):  # ValueError: it has no signature
                inspect.signature(callback).bind(*range(count))
                return count == 3
    raise ConfigError(f"callbacks={callback!r}: not a function of (step, metrics) or (step, metrics, view). Change it.")


def as_metric(name: str, value: Any) -> float:
    """The value of a metric. Raises ConfigError for what is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ConfigError(f"callbacks: metrics[{name!r}]={value!r:.80} is not a number. Add numbers alone.") from None


def prefixed(role: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics under `role/`."""
    return {f"{role}/{name}": value for name, value in metrics.items()}
