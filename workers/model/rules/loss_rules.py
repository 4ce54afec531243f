"""Rules on the settings of a loss, shared by `--dry-run` and the losses; imports no torch."""

from workers.config import LossConfig
from workers.errors import ConfigError

NORM = "sequence_mean_token_sum_norm"


def check_loss(config: LossConfig) -> None:
    """Raise ConfigError if settings of a policy loss conflict."""
    check_constant_length("algorithm.loss.", config.aggregation, config.constant_length)
    if 0 < config.dual_clip <= 1:
        raise ConfigError(f"algorithm.loss.dual_clip={config.dual_clip} must be above 1, or 0 for no dual clip.")
    if config.clip_cov_low >= config.clip_cov_high:
        raise ConfigError(
            f"algorithm.loss.clip_cov_low={config.clip_cov_low} is not below clip_cov_high={config.clip_cov_high}."
        )


def check_constant_length(section: str, aggregation: str, constant_length: int) -> None:
    """Raise ConfigError if the aggregation needs `constant_length`. section: of the settings, with a dot at its end."""
    if aggregation == NORM and constant_length <= 0:
        raise ConfigError(
            f"{section}aggregation={NORM} divides by {section}constant_length, which is {constant_length}; set it, "
            "such as to the tokens of the longest response."
        )


def undecorated(function: str) -> ConfigError:
    """Return the error about a custom loss, `module:function`, that is not registered by `policy_loss`."""
    return ConfigError(
        f"algorithm.loss.function={function!r} does not state its normaliser; decorate it with "
        "@policy_loss(NAME, aggregation=...)."
    )
