"""Whether validation gives the metric by which validation.keep_best keeps a model: known before a run begins."""

import re
from collections.abc import Iterable

from controller.config import Config
from controller.validation_metrics import is_possible, possible_metrics
from workers.errors import ConfigError

COUNTED = re.compile(r"(?:.*/)?(?:pass|maj)@\d+")


def check_counted_metric(config: Config) -> None:
    """Raise ConfigError for a pass@k or maj@n that validation.samples do not give."""
    name, samples = config.validation.keep_best, config.validation.samples
    if COUNTED.fullmatch(name) and not is_possible(name, samples, ()):
        raise ConfigError(
            f"validation.keep_best={name} is no metric of validation.samples={samples}, which give "
            f"{', '.join(possible_metrics(samples, ()))}; choose one of them, or change validation.samples."
        )


def check_keep_best(config: Config, parts: Iterable[str]) -> None:
    """Raise ConfigError if rewards with these parts do not give the metric that validation.keep_best names.

    What an environment, a reward model or the punishment of long responses adds is known to the run alone.
    """
    name, samples = config.validation.keep_best, config.validation.samples
    adds = config.rollout.environment or config.uses_reward_model or config.reward.overlong_tokens
    if name and not adds and not is_possible(name, samples, parts):
        raise ConfigError(
            f"validation.keep_best={name} is not a validation metric: the reward gives "
            f"{', '.join(possible_metrics(samples, parts))}; choose one of them, or return {name} for every response."
        )
