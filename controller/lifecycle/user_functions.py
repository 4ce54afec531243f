"""Find the functions that replace parts of a run, and try each on made-up input before anything starts.

setting --find_function, in its process--> UserFunction --made-up samples, records or predictions--> tried
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from controller.config import Config, TrainingConfig
from controller.config.file import value_of
from controller.config.functions import requested_names
from controller.config.python_rewards import NONE_GIVEN, GivenFunctions
from controller.data.curriculum import (
    SAMPLER_TAKES,
    SampledPrompts,
    choose,
    isolated_order,
    nothing_chosen,
)
from controller.data.prompts import Curriculum, PromptDataset
from controller.data.records import Record
from controller.data.sample_functions import FORMS, OFFERED, Functions, SampleFunction
from controller.observability.slow_work import Log, log_if_slow
from controller.preflight.data_checks import RESERVED
from workers.batch.dataproto import object_column, record_column
from workers.engine.requests import COUNTS
from workers.errors import ConfigError, DataError
from workers.user_code.functions import (
    TIMEOUT_SETTING,
    IsolatedFunction,
    UserFunction,
    check_loss,
    find_function,
)

Records = dict[str, list[Record]]


@contextmanager
def waiting(
    log: Log, subject: str, config: TrainingConfig, setting: str = TIMEOUT_SETTING
) -> Iterator[None]:
    with log_if_slow(
        log, f"waiting for {subject} (at most {setting}={value_of(config, setting):g} s)"
    ):
        yield


def import_function(config: Config, log: Log, key: str, name: str) -> UserFunction:
    with waiting(log, f"the import of {name}, {key}", config):
        return find_function(key, name, timeout_s=config.resources.user_code_timeout_s)


def find_step(
    config: Config, log: Log = print, functions: GivenFunctions = NONE_GIVEN
) -> bytes:
    """Pickle the function of run.step. Raises ConfigError unless it takes only the run."""
    key = "run.step"
    name = config.run.step
    function = functions.get(name) or import_function(config, log, key, name)
    if not function.signature.names or len(function.signature.required) > 1:
        raise ConfigError(
            f"{key}={name!r}: must take one parameter, the run. Write `def step(run)`."
        )
    return function.packed


def find_functions(
    config: Config, log: Log = print, settings: Sequence[str] = tuple(FORMS)
) -> Functions:
    """Return those functions of samples among `settings` that are set, not tried. Raises ConfigError."""
    functions = {}
    for key in settings:
        if name := value_of(config, key):
            function = import_function(config, log, key, name)
            isolated = IsolatedFunction(
                f"{key}={name!r}", function, config.resources.user_code_timeout_s
            )
            functions[key] = SampleFunction(isolated, function.signature.names, FORMS[key])
    return functions


def try_functions(
    config: Config, train: Records, parts: Mapping[str, float], log: Log = print
) -> Functions:
    """Return the functions of samples, tried on made-up groups. Raises ConfigError or DataError.

    parts: of the reward of an empty response.
    """
    first, last = (next(iter(train.values()))[place] for place in (0, -1))
    data_columns = {
        name: record_column([first[name]] * 2 + [last.get(name)] * 2)
        for name in first.keys() - RESERVED
    }
    columns = (
        data_columns
        | {
            name: np.full(4, value)
            for name, value in parts.items()
            if name not in data_columns
        }
        | _made_up()
    )
    functions = dict[str, SampleFunction]()
    for key, sample_function in find_functions(config, log).items():
        name = value_of(config, key)
        rows = 2 if key == "algorithm.group_filter" else 4
        columns = (
            columns | {"advantage": np.array([1.0, -1.0] * 2)}
            if key == "batch.replay.by"
            else columns
        )
        names = requested_names(key, name, sample_function.function.signature, columns)
        for path, records in train.items():
            check_columns(
                path,
                records,
                dict.fromkeys(data_columns.keys() & set(names), f"{key}={name!r}"),
            )
        functions[key] = function = replace(sample_function, names=names)
        with (
            waiting(log, f"{key}, tried on made-up samples", config),
            closing(function.function),
        ):
            for rewards in (columns["reward"], np.zeros(4)):
                function(
                    {
                        column_name: column[:rows]
                        for column_name, column in (columns | {"reward": rewards}).items()
                    }
                )
    return functions


def _made_up() -> dict[str, np.ndarray]:
    """Return columns of two groups of two samples."""
    columns = dict.fromkeys(OFFERED, np.arange(1, 5))
    numbers = {
        "reward": [1.0, 0.0, 1.0, 0.0],
        "group": [0, 0, 1, 1],
        "sample": [0, 1, 0, 1],
        "truncated": [False] * 4,
    }
    return (
        columns
        | {name: np.array(values) for name, values in numbers.items()}
        | {"response": object_column([""] * 4)}
    )


def check_columns(path: str, records: Sequence[Record], takers: Mapping[str, str]) -> None:
    """Raise DataError for a record without one of the columns `takers`, which the function of each takes."""
    for number, record in enumerate(records, start=1):
        if missing := sorted(takers.keys() - record.keys()):
            raise DataError(
                f"{path}: record {number} lacks {missing}, which {takers[missing[0]]} takes."
            )


def try_curriculum(config: Config, train: Records, log: Log) -> Curriculum | None:
    key = "data.curriculum"
    name = config.data.curriculum
    if not name:
        return None
    curriculum = partial(
        isolated_order,
        import_function(config, log, key, name),
        config.resources.user_code_timeout_s,
    )
    with waiting(log, f"{key}, tried on the first epoch", config):
        for rows in train.values():
            curriculum(rows, 0)
    return curriculum


def try_sampler(
    config: Config, train: Records, log: Log
) -> Callable[[PromptDataset], SampledPrompts] | None:
    """Return the prompts of data.sampler for a data set. Tries it on two steps with made-up rewards."""
    key = "data.sampler"
    name = config.data.sampler
    if not name:
        return None
    (rows,), count, seed = train.values(), config.batch.prompts_per_step, config.run.seed
    function = import_function(config, log, key, name)
    requested_names(key, name, function.signature, SAMPLER_TAKES)
    make = partial(
        IsolatedFunction, f"{key}={name!r}", function, config.resources.user_code_timeout_s
    )
    with (
        waiting(log, f"{key}, tried on two steps", config),
        closing(make(records=rows)) as sampler,
    ):
        state = choose(sampler, nothing_chosen(0), count, seed, len(rows))
        results = [[number, [0.0, 1.0]] for number in state["chosen"]]
        choose(sampler, state | {"results": results}, count, seed, len(rows))
    return lambda dataset: SampledPrompts(dataset, make(records=dataset.records), seed)


def try_loss(config: Config, records: Sequence[Record], log: Log) -> None:
    """Compute the gradient of a custom loss on made-up predictions. Raises ConfigError."""
    key = "algorithm.loss.function"
    name = config.algorithm.loss.function
    with waiting(log, f"the import of {name}, {key}", config):
        check_loss(
            key,
            name,
            *loss_trial(config, records),
            timeout_s=config.resources.user_code_timeout_s,
        )


def loss_trial(config: Config, records: Sequence[Record]) -> tuple[Any, ...]:
    """Return the settings of a policy loss and columns like a step's, for `check_loss`."""
    first = [records[0], records[-1]]
    columns = {}
    for name in config.loss_columns:
        columns[name] = record_column([record[name] for record in first])
    columns |= dict.fromkeys(COUNTS, np.array([2, 3])) | {
        "uid": np.array(["0", "1"]),
        "sample": np.array([0, 0]),
    }
    columns |= dict.fromkeys(("reward", "advantages", "seconds"), np.array([1.0, -1.0]))
    columns |= {
        **dict.fromkeys(("group_number", "sample_number"), np.array([0, 1])),
        "group_tokens": np.array([2, 3]),
        "truncated": np.array([False, True]),
    }
    columns |= (
        {"greedy_reward": np.array([0.0, 1.0])}
        if config.algorithm.advantage == "remax"
        else {}
    )
    columns |= (
        {"kept_advantages": np.array([np.nan, 1.0])} if config.batch.replay.share else {}
    )
    token_columns = {
        "rollout_log_probs": True,
        "old_log_probs": config.old_log_probs != "update",
        "old_entropies": config.algorithm.loss.old_entropies,
        "reference_log_probs": config.uses_reference,
        "teacher_log_probs": config.uses_teacher
        and config.algorithm.loss.distillation.over == "token",
    }
    tokens = tuple(name for name, is_used in token_columns.items() if is_used)
    return (
        config.policy_loss,
        columns,
        tokens,
        {"step": 1, "steps": config.run.steps, "epoch": 0},
    )
