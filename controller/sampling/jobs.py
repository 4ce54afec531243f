"""Define a job: the samples that a command makes, its model and settings, and its output.

--config, --model, overrides --narrowed, checked--> settings --data, rewards read and tried--> Job
"""

from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from controller.actors.layout import idle_gpus
from controller.config import Config, load_as
from controller.config.conditions import leave_out_cpu_settings
from controller.config.python_rewards import GivenFunctions, Reward, give_rewards
from controller.config.recorded import check_trusted, load_recorded
from controller.config.sampler import SamplerConfig, check_effect
from controller.config.training import count_noun
from controller.data.prompts import Prompt
from controller.lifecycle.input_lines import prompt_lines
from controller.lifecycle.inputs import try_inputs
from controller.lifecycle.model_checks import check_models
from controller.lifecycle.tokenized_inputs import Inputs, read_inputs, tokenize_inputs
from controller.observability.slow_work import Log
from controller.preflight.checks import check_sampler
from controller.preflight.cluster import check_machine
from controller.preflight.describe import warnings
from controller.sampling.models import OF_RUN, Model, choose_model
from controller.sampling.output import Key, check_same_job, job_identity
from workers.errors import ConfigError, Problems
from workers.user_code.task_sources import CODE, package_of


@dataclass(frozen=True)
class JobRequest:
    """JobRequest of a user, see `ballast.generate`. settings: instead of a file's."""

    config: Path | None = None
    model: str = ""
    output: Path | None = None
    settings: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    prompts: int = 0
    reward: Reward | None = None
    trust_run: bool = False


@dataclass(frozen=True)
class Job:
    """config: narrowed, with the output as run folder and the sampled model as model.path.
    prompts: by uid.
    """

    config: SamplerConfig
    model: Model
    inputs: Inputs
    prompts: dict[str, Prompt]
    identity: dict[str, Any]
    warnings: tuple[str, ...]

    @property
    def keys(self) -> list[Key]:
        """Return (uid, sample) of its samples, in prompt order."""
        return [
            (uid, sample)
            for uid in self.prompts
            for sample in range(self.config.rollout.samples_per_prompt)
        ]


def read_job(
    config: SamplerConfig,
    model: Model,
    functions: GivenFunctions,
    prompts: int,
    log: Log = print,
) -> Job:
    """Read data and rewards, and check that the output holds no other job. Raises ConfigError or
    DataError.
    """
    inputs = read_inputs(config, log, functions)
    identity = job_identity(model, config, inputs.identity, functions)
    check_same_job(config.run_folder, identity)
    first = islice(
        chain.from_iterable(inputs.sources), prompts or config.first_prompts or None
    )
    by_uid = {str(uid): replace(prompt, uid=str(uid)) for uid, prompt in enumerate(first)}
    warning_lines = (*warnings(config), *inputs.warnings)
    # Only now, because a checkpoint may not be written as a model yet.
    config = replace(
        config, model=replace(config.model, path=model.path or config.model.path)
    )
    return Job(config, model, inputs, by_uid, identity, warning_lines)


def checked_settings(
    schema: type[SamplerConfig], request: JobRequest
) -> tuple[SamplerConfig, Model, GivenFunctions]:
    if request.prompts < 0:
        raise ConfigError(
            f"prompts={request.prompts}: must be at least 0, which takes all."
        )
    config, model = job_settings(schema, request)
    functions = give_rewards(config.reward, request.reward)
    leave_out_cpu_settings(config)
    check_sampler(config, functions)
    return config, model, functions


def job_settings(
    schema: type[SamplerConfig], request: JobRequest
) -> tuple[SamplerConfig, Model]:
    model = choose_model(request.model)
    path = request.config or (None if request.settings else _of_run(model))
    config = load_as(
        schema, path, [*request.settings, *request.overrides, "run.resume=auto"]
    )
    if (
        not (request.config or request.settings or request.trust_run)
        and model.run is not None
    ):
        functions = [
            *(() if request.reward else config.reward.weights),
            *config.rollout.code,
            *filter(None, [config.reward.judge.function]),
            *(
                path
                for path in (*config.data.weights, config.data.validation)
                if package_of(path) in CODE
            ),
        ]
        check_trusted(
            model.run,
            functions,
            request.overrides,
            "add --trust-run, or give your own --config",
        )
    check_effect(
        config,
        request.overrides,
        uses_ranks=config.uses_reward_model or model.checkpoint is not None,
    )
    if model.path and any(
        override.startswith("model.path=") for override in request.overrides
    ):
        raise ConfigError("--model and model.path both name a model. Give one of them.")
    beside = config.run_folder.with_name(f"{config.run.name}-{config.command}")
    output = request.output or (
        model.run / config.command / model.name if model.run else beside
    )
    config = config.narrowed(output)
    if model.path and model.checkpoint is None:
        config = replace(config, model=replace(config.model, path=model.path))
    return config, model


def _of_run(model: Model) -> Path:
    if model.path and model.run is None and not Path(model.path).exists():
        raise ConfigError(
            f"--model={model.path}: there is no such run. Name a run, or give --config FILE too."
        )
    if model.run is None:
        raise ConfigError(
            "--config is not given. Give it, or --model runs/NAME, whose settings are then taken."
        )
    if not isinstance(load_recorded(model.run / OF_RUN), Config):
        raise ConfigError(
            f"{model.run} trained on given sequences, without engines and rewards. Give --config FILE."
        )
    return model.run / OF_RUN


def describe_job(schema: type[SamplerConfig], request: JobRequest) -> str:
    config, model, functions = checked_settings(schema, request)
    problems = Problems()
    with problems.collecting():
        check_machine(config, dry_run=True)
    with problems.collecting():
        check_models(config)
    with problems.collecting():
        trial = try_inputs(config, call_functions=functions)
    problems.raise_all()
    check_same_job(
        config.run_folder, job_identity(model, config, trial.identity, functions)
    )
    sampling = config.rollout.sampling
    samples = config.rollout.samples_per_prompt
    total_prompts = sum(map(len, trial.train.values()))
    prompts = min(total_prompts, request.prompts or config.first_prompts or total_prompts)
    written = (
        f"{model.checkpoint}, to be written as a model to {model.path}"
        if model.is_missing
        else ""
    )
    cut = [f"temperature={sampling.temperature:g}", *sampling.cuts, *sampling.changes]
    options = ", ".join(option.replace("=", " ", 1) for option in cut)
    played = [] if config.rollout.tools else config.rollout.code
    scoring = [
        config.reward.model.path,
        *config.reward.model.paths.values(),
        config.reward.judge.model,
    ]
    rewards = [*config.reward.weights, *played, *filter(None, scoring)]
    return "\n".join(
        [
            f"model: {written or config.model.path}",
            f"data: {', '.join(config.data.weights)}, {count_noun(prompts, 'prompt')}",
            f"samples: {samples * prompts:,}, {samples} of each prompt; {options}, at most "
            f"{sampling.max_new_tokens} new tokens ({config.sampling_key})",
            f"rewards: {', '.join(rewards) or 'none'}",
            f"engines: {config.engine_range}, on {'GPUs' if config.uses_gpus else 'CPUs'}",
            f"output: {config.run_folder}",
            *(f"warning: {line}" for line in idle_gpus(config, config.gpus)),
            *prompt_lines(tokenize_inputs(config, trial)),
        ]
    )
