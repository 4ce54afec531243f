"""Checks of validation.*: its samples differ, and it gives the metric that validation.keep_best names."""

import re
from collections.abc import Iterable

from controller.config import Config
from controller.validation_metrics import is_possible, possible_metrics
from workers.errors import ConfigError

COUNTED = re.compile(r"(?:.*/)?(?:pass|maj)@\d+")


def check_validation(config: Config) -> None:
    """Raise ConfigError for equal samples, or a pass@k or maj@n that validation.samples do not give."""
    name, samples = config.validation.keep_best, config.validation.samples
    if samples > 1 and config.validation.sampling.temperature == 0:
        raise ConfigError(
            f"validation.samples={samples} at validation.sampling.temperature=0 are {samples} equal responses; "
            "set samples to 1 or the temperature above 0."
        )
    if COUNTED.fullmatch(name) and not is_possible(name, samples, ()):
        raise ConfigError(
            f"validation.keep_best={name} is no metric of validation.samples={samples}, which give "
            f"{', '.join(possible_metrics(samples, ()))}; choose one of them, or change validation.samples."
        )


def check_keep_best(config: Config, parts: Iterable[str]) -> None:
    """Raise ConfigError if rewards with these parts do not give the metric that validation.keep_best names.

    Parts that an environment, a reward model or the punishment of long responses adds are known only in the run.
    """
    name, samples = config.validation.keep_best, config.validation.samples
    adds = config.rollout.environment or config.uses_reward_model or config.reward.overlong_tokens
    if name and not adds and not is_possible(name, samples, parts):
        raise ConfigError(
            f"validation.keep_best={name} is not a validation metric: the reward gives "
            f"{', '.join(possible_metrics(samples, parts))}; choose one of them, or return {name} for every response."
        )
