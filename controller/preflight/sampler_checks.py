"""The checks of `preflight.checks` that concern engines, data and rewards, for commands that train nothing."""

from controller.actors.cluster_address import check_address
from controller.config.python_rewards import NONE_GIVEN, GivenFunctions
from controller.config.sampler import SamplerConfig
from controller.preflight.checks import check_rewards
from controller.preflight.critic_checks import check_reward_model
from controller.preflight.data_checks import check_data
from controller.preflight.engine_checks import (
    check_engine_count,
    check_lengths,
    check_temperatures,
    check_turns,
)
from controller.preflight.training_checks import check_model_files, check_writable
from workers.errors import ConfigError
from workers.rollout.engine_options import check_engine_options


def check_sampler(config: SamplerConfig, given: GivenFunctions = NONE_GIVEN) -> None:
    """Raise ConfigError at the first thing that cannot work. config: narrowed. given: see `check`."""
    check_writable(config.run_folder, "--output")
    check_address(config)
    check_engine_count(config)
    samples, temperature = config.rollout.samples_per_prompt, f"{config.sampling_key}.temperature"
    if samples > 1 and config.rollout.sampling.temperature == 0:
        raise ConfigError(f"{temperature}=0: {samples} samples of a prompt are equal. Ask for one, or set it above 0.")
    check_engine_options(config.rollout.engine)
    check_temperatures(config)
    check_turns(config)
    check_lengths(config)
    check_reward_model(config)
    check_data(config, check_model_files(config))
    if config.needs_reward or config.rewarded:
        check_rewards(config, given)
