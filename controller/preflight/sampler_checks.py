"""Checks of the commands that sample and train nothing: what of `checks` concerns engines, data and rewards."""

from controller.actors.cluster_address import check_address
from controller.config.given import NONE_GIVEN, GivenFunctions
from controller.config.model_files import check_whole, read_model_files
from controller.config.sampler import SamplerConfig
from controller.preflight.checks import check_rewards
from controller.preflight.critic_checks import check_reward_model
from controller.preflight.data_checks import check_data
from controller.preflight.engine_checks import (
    check_engine_count,
    check_engine_model,
    check_lengths,
    check_temperatures,
    check_turns,
)
from controller.preflight.model_types import CAUSAL, check_model_type
from controller.preflight.training_checks import check_writable
from controller.preflight.weights import HEAD, check_weights
from workers.errors import ConfigError
from workers.rollout.engine_options import check_engine_options


def check_sampler(config: SamplerConfig, given: GivenFunctions = NONE_GIVEN, *, needs_reward: bool) -> None:
    """Raise ConfigError at the first thing that cannot work. config: narrowed. given: see `check`."""
    check_writable(config.run_folder, "--output")
    check_address(config)
    check_engine_count(config)
    _check_samples_differ(config)
    check_engine_options(config.rollout.engine)
    check_temperatures(config)
    check_turns(config)
    check_lengths(config)
    path = config.model.path
    model = read_model_files(path, "model.path")
    check_whole(model, path, "model.path")
    check_model_type(model.description, "model.path", path, CAUSAL)
    check_weights(model, "model.path", path, output=HEAD)
    check_engine_model(config, model)
    check_reward_model(config, model)
    check_data(config, model)
    if needs_reward or config.rewarded:
        check_rewards(config, given)


def _check_samples_differ(config: SamplerConfig) -> None:
    samples, key = config.rollout.samples_per_prompt, config.sampling_key
    if samples > 1 and config.rollout.sampling.temperature == 0:
        raise ConfigError(
            f"{samples} samples of a prompt at {key}.temperature=0 are equal; ask for one, or set it above 0."
        )
