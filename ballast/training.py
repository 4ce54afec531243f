"""The training commands as functions: settings in, a Result out.

    fit(settings, reward=f) --controller.fit.prepare--> the run --> runs/NAME/ --> Result

Runs in this process. Instead of printing one line and exiting with 1 or 2, functions raise an error of
`workers.errors`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ballast.records import Records, data_file
from ballast.settings import Values, check_list, load_settings
from controller.config import Config, TrainingConfig
from controller.config.offline import (
    OfflineConfig,
    PreferencesConfig,
    RewardTrainingConfig,
    SftConfig,
)
from controller.config.python_rewards import Reward, give_rewards, give_step
from controller.lifecycle.interrupts import handlers_kept
from controller.observability.run_folder import RunFolder

if TYPE_CHECKING:
    from controller.training_loop import Callback, Step

Settings = str | Path | Mapping[str, Any] | None


@dataclass(frozen=True)
class Result:
    """A finished run.

    folder: runs/NAME. summary: content of summary.json: `steps`, `validation` before and after, median
    `seconds_per_step` and `tokens_per_second`. metrics: a row per training step, with its number under
    `step`, or None if not finite. validations: a row per validation, step 0 before training, by names such as
    `validation/reward`. A resumed run has the rows of all its steps.
    """

    folder: Path
    summary: dict[str, Any]
    metrics: list[dict[str, float | None]]
    validations: list[dict[str, float | None]] = field(default_factory=list)

    @property
    def model(self) -> Path:
        """Folder of the trained model, in Hugging Face format."""
        return self.folder / "model"

    @classmethod
    def read(cls, folder: Path) -> "Result":
        """Read a finished run's result. Raises OSError or DataError if no run has finished."""
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        # Apart, because a table of both has empty cells: step 0 trains nothing, and few steps validate.
        rows = RunFolder(folder).metrics
        trained = [_of_validation(row, False) for row in rows if row["step"]]
        validations = [
            validation_row
            for row in rows
            if len(validation_row := _of_validation(row, True)) > 1
        ]
        return cls(folder, summary, trained, validations)

    def __repr__(self) -> str:
        return f"Result(folder={str(self.folder)!r}, steps={self.summary['steps']})"


def _of_validation(row: Mapping[str, Any], validated: bool) -> dict[str, Any]:
    names = (
        name
        for name in row
        if (name.startswith("validation/") or name == "time/validation_s") == validated
    )
    return {"step": row["step"]} | {name: row[name] for name in names}


def fit(
    config: Settings = None,
    *,
    reward: Reward | None = None,
    step: "Step | str | None" = None,
    callbacks: Sequence["Callback"] = (),
    overrides: Values = (),
    train: Records | None = None,
    validation: Records | None = None,
) -> Result:
    """Train a policy by reinforcement learning, as `python -m controller.fit` does, and return when the run
    is over.

    config: a YAML file, or settings as a mapping. reward: a function, or several with weights, instead of
    reward.function: closures, lambdas, or names as in the settings. They are pickled into other processes,
    and cannot change variables here. step: replaces run.step, in this process (see `controller.step`).
    callbacks: see `controller.training_loop.Callback`. They may raise StopTraining. overrides: replace
    settings of `config`. train,
    validation: records instead of data.train and data.validation, such as a list of mappings or a
    `datasets.Dataset`.

    Raises ConfigError, DataError or ResourceError before anything starts, and later the error that ends the
    run, such as RolloutError. All are BallastError. KeyboardInterrupt stops the run as for the command.
    """
    from controller.fit import prepare

    settings = load_settings(Config, config, overrides)
    give_data(settings, train, validation)
    functions = {**give_rewards(settings.reward, reward), **give_step(settings.run, step)}
    step_function = step if callable(step) else None
    return _result(
        settings,
        callbacks,
        lambda callbacks: prepare(settings, functions, callbacks, step_function),
    )


def sft(
    config: Settings = None,
    *,
    callbacks: Sequence["Callback"] = (),
    overrides: Values = (),
    train: Records | None = None,
    validation: Records | None = None,
) -> Result:
    """Train a policy on given responses, as `python -m controller.sft` does. The rest is as in `fit`."""
    return _offline(
        load_settings(SftConfig, config, overrides), callbacks, train, validation
    )


def preferences(
    config: Settings = None,
    *,
    callbacks: Sequence["Callback"] = (),
    overrides: Values = (),
    train: Records | None = None,
    validation: Records | None = None,
) -> Result:
    """Train a policy on pairs of responses, as `python -m controller.preferences` does. The rest is as in
    `fit`.
    """
    return _offline(
        load_settings(PreferencesConfig, config, overrides), callbacks, train, validation
    )


def reward_model(
    config: Settings = None,
    *,
    callbacks: Sequence["Callback"] = (),
    overrides: Values = (),
    train: Records | None = None,
    validation: Records | None = None,
) -> Result:
    """Train a reward model, as `python -m controller.reward_model` does. The rest is as in `fit`."""
    return _offline(
        load_settings(RewardTrainingConfig, config, overrides), callbacks, train, validation
    )


def _offline(
    settings: OfflineConfig,
    callbacks: Sequence["Callback"],
    train: Records | None,
    validation: Records | None,
) -> Result:
    from controller.offline.offline_training import prepare

    give_data(settings, train, validation)
    return _result(settings, callbacks, partial(prepare, settings))


def give_data(
    settings: Config | OfflineConfig, train: Records | None, validation: Records | None
) -> None:
    if train is not None:
        settings.data.train = data_file(train, "train", settings.run.dir)
        if isinstance(settings, Config):
            settings.data.sources = {}
    if validation is not None:
        settings.data.validation = data_file(validation, "validation", settings.run.dir)


def _result(
    settings: TrainingConfig,
    callbacks: Sequence["Callback"],
    prepare: Callable[[Sequence["Callback"]], Callable[[], None] | None],
) -> Result:
    checked_callbacks = check_list(
        "callbacks", callbacks, callable, "a list of functions of a step and its metrics"
    )
    with handlers_kept():
        start = prepare(checked_callbacks)
        if start is not None:
            start()
    return Result.read(settings.run_folder)
