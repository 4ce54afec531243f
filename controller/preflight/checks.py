"""Check a configuration for impossible combinations, settings without effect and missing files.

    check(config) --> nothing, or ConfigError: one line that names the settings and what to change

Nothing is imported or started: checks read config.json of models and parse reward functions. Ray's resources
are checked later, when the placement groups are reserved.
"""

import re

from controller.actors.cluster_address import check_address
from controller.config import Config
from controller.config.conditions import check_settings_have_effect
from controller.config.file import value_of
from controller.config.functions import OF_SAMPLES, check_function, check_reward_function
from controller.config.python_rewards import NONE_GIVEN, GivenFunctions
from controller.config.sampler import SamplerConfig
from controller.preflight.algorithm_checks import (
    check_advantage,
    check_critic,
    check_loss,
    check_replay,
    check_validation,
)
from controller.preflight.data_checks import check_data
from controller.preflight.engine_checks import (
    check_batch_invariance,
    check_engine_adapters,
    check_engine_count,
    check_lengths,
    check_samplings,
    check_turns,
    check_weight_sync,
    response_limit,
)
from controller.preflight.judge_checks import check_judge
from controller.preflight.tracker_checks import check_trackers
from controller.preflight.training_checks import (
    check_attention,
    check_counts,
    check_model_files,
    check_one_policy,
    check_parallel,
    check_run,
    check_writable,
)
from workers.config.roles import RewardModelConfig
from workers.engine.engine_options import check_engine_options
from workers.engine.placement import fits_device
from workers.errors import ConfigError, Problems, check_together


def check(
    config: Config, functions: GivenFunctions = NONE_GIVEN, *, needs_data: bool = True
) -> None:
    """Raise one error for each independent part that cannot work or has no effect, together.

    functions: passed to the call.
    needs_data: False for a loop that may bring its own prompts and rewards.
    """
    check_together(
        lambda: check_settings(config),
        lambda: check_one_policy(config) if needs_data else None,
        lambda: check_parallel(config),
        lambda: check_critic(config),
        lambda: check_model_files(config),
        lambda: check_data(config) if needs_data or config.has_data else None,
        lambda: check_rewards(config, functions) if needs_data or config.rewarded else None,
        lambda: _check_functions(config, functions),
        lambda: check_trackers(config),
    )


def _check_functions(config: Config, functions: GivenFunctions) -> None:
    names = {
        key: value_of(config, key) for key in ("run.step", *OF_SAMPLES, "data.sampler")
    }
    problems = Problems()
    for key, name in names.items():
        with problems.collecting():
            if name and name not in functions:
                check_function(key, name)
    with problems.collecting():
        if (
            config.algorithm.advantage == "custom"
            and not config.algorithm.advantage_function
        ):
            raise ConfigError(
                "algorithm.advantage=custom: algorithm.advantage_function is empty. Name a function."
            )
    problems.raise_all()


def check_settings(config: Config) -> None:
    """Run the part of `check` that does not read models, data or rewards."""
    check_together(
        lambda: check_settings_have_effect(config),
        lambda: check_run(config),
        lambda: check_advantage(config),
        lambda: check_counts(config),
        lambda: check_loss(config),
        lambda: check_replay(config),
        lambda: _check_temperature(config),
        lambda: check_validation(config),
        lambda: check_engine_count(config),
        lambda: check_weight_sync(config),
        lambda: check_engine_adapters(config),
        lambda: check_batch_invariance(config),
        lambda: check_engine_options(config.rollout.engine),
        lambda: check_samplings(config),
        lambda: check_turns(config),
        lambda: _check_overlong(config),
        lambda: check_lengths(config),
        lambda: _check_devices(config),
        lambda: check_attention(config),
    )


def _check_temperature(config: Config) -> None:
    if config.rollout.sampling.temperature == 0:
        raise ConfigError(
            "rollout.sampling.temperature=0: samples are equal and carry no signal. Set it above 0 "
            "(validation.sampling.temperature may be 0)."
        )


def _check_overlong(config: Config) -> None:
    if config.reward.overlong_tokens >= config.longest_response:
        raise ConfigError(
            f"reward.overlong_tokens={config.reward.overlong_tokens}: it punishes every response. Set it "
            f"below {response_limit(config)}={config.longest_response}."
        )


def check_layout(config: Config) -> None:
    """Run the part of `check` on ranks, caps and loss, to replay a checked run with another layout."""
    check_counts(config)
    check_loss(config)
    check_lengths(config)
    _check_devices(config)
    check_attention(config)
    check_parallel(config)


def _check_devices(config: Config) -> None:
    """bfloat16 on CPU is allowed, to reproduce the rounding of a GPU run."""
    placement = config.rollout_placement
    fits = fits_device(placement, has_gpu=config.uses_gpus)
    if not fits and not config.uses_gpus:
        raise ConfigError(
            f"rollout.placement={placement} needs GPUs and resources.device={config.resources.device} gives "
            "none here. Set rollout.placement=auto, or resources.device=cuda for a cluster with GPUs."
        )
    if not fits:
        raise ConfigError(
            "rollout.placement=shared_memory is for CPUs and the run uses GPUs. Set colocated or apart, "
            "or resources.device=cpu."
        )
    if placement == "colocated" and config.rollout.max_staleness:
        raise ConfigError(
            f"rollout.max_staleness={config.rollout.max_staleness} generates while the policy trains, but "
            "rollout.placement=colocated has them take turns on the same GPUs. Set "
            "rollout.placement=apart, or rollout.max_staleness=0."
        )
    engine_gpus = config.engines * config.rollout.tensor_parallel
    if placement == "colocated" and engine_gpus > config.training_workers:
        raise ConfigError(
            f"rollout.replicas * rollout.tensor_parallel = {engine_gpus} GPUs are more than the "
            f"{config.training_workers} of the policy that they share. Lower them, raise "
            "policy.data_parallel, or set rollout.placement=apart."
        )


def _check_reward_models(model: RewardModelConfig) -> None:
    if model.path and model.paths:
        raise ConfigError(
            f"reward.model.path={model.path}: reward.model.paths names models too. Set one of the two."
        )
    if unknown := sorted(model.weights.keys() - model.paths.keys()):
        path_names = ", ".join(model.paths)
        raise ConfigError(
            f"reward.model.weights.{unknown[0]}: reward.model.paths has only {path_names}. Correct the name."
        )
    for name, weight in model.named_weights.items():
        key = f"weights.{name}" if name in model.weights else "weight"
        if weight == 0:
            raise ConfigError(
                f"reward.model.{key}={weight}: the model has no effect. Remove it."
            )
        if name and not re.fullmatch(r"\w+", name):
            raise ConfigError(
                f"reward.model.paths: {name!r} becomes a metric. Use letters, digits and _."
            )


def check_rewards(config: Config, functions: GivenFunctions = NONE_GIVEN) -> None:
    ways = bool(config.reward.function) + bool(config.reward.functions)
    played = config.rollout.environment or config.rollout.runs_agent
    by_model = config.uses_reward_model or config.uses_judge
    if ways > 1 or not (ways or played or by_model or config.algorithm.advantage == "none"):
        raise ConfigError(
            "one of reward.function and reward.functions (several, by weight) must be set, and not both. "
            "None is needed with rollout.environment, an agent, reward.model.path, reward.judge.model and "
            "algorithm.advantage=none."
        )
    problems = Problems()
    with problems.collecting():
        if config.uses_reward_model:
            _check_reward_models(config.reward.model)
    with problems.collecting():
        if config.uses_judge:
            check_judge(config)
    key = "reward.functions" if config.reward.functions else "reward.function"
    names: dict[str, str] = {}
    for function in config.reward.weights:
        with problems.collecting():
            if function not in functions:
                check_reward_function(key, function)
            first_function = names.setdefault(function.rpartition(":")[2], function)
            if first_function != function:
                raise ConfigError(
                    f"{key}: {first_function} and {function} have the same name in metrics. Rename one of "
                    "them."
                )
    problems.raise_all()


def check_sampler(config: SamplerConfig, functions: GivenFunctions = NONE_GIVEN) -> None:
    """Run the part of `check` that sampling needs. config: narrowed."""
    samples = config.rollout.samples_per_prompt
    temperature = f"{config.sampling_key}.temperature"
    problems = Problems()
    with problems.collecting():
        if samples > 1 and config.rollout.sampling.temperature == 0:
            raise ConfigError(
                f"{temperature}=0: {samples} samples of a prompt are equal. Ask for one, or set it above 0."
            )
    with problems.collecting():
        check_together(
            lambda: check_writable(config.run_folder, "--output"),
            lambda: check_address(config),
            lambda: check_engine_count(config),
            lambda: check_engine_options(config.rollout.engine),
            lambda: check_samplings(config),
            lambda: check_turns(config),
            lambda: check_lengths(config),
            lambda: check_model_files(config),
            lambda: check_data(config),
            lambda: (
                check_rewards(config, functions)
                if config.needs_reward or config.rewarded
                else None
            ),
        )
    problems.raise_all()
