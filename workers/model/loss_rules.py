"""Rules on the settings of a loss, shared by `--dry-run` and the losses; imports no torch."""

from workers.config import POLICY_LOSS_SETTINGS, LossConfig
from workers.errors import ConfigError

NORM = "sequence_mean_token_sum_norm"
READERS = {
    setting: tuple(loss for loss, names in POLICY_LOSS_SETTINGS.items() if setting in names)
    for setting in dict.fromkeys(name for names in POLICY_LOSS_SETTINGS.values() for name in names)
} | dict.fromkeys(("function", "columns", "old_entropies"), ("custom",))
"""The losses that read each setting, for settings that only some losses read."""


def check_loss(config: LossConfig) -> None:
    """Raise ConfigError if settings of a policy loss contradict one another, or the loss does not read one."""
    # A loss of a user's own, custom or registered under another name, may read any of them.
    losses = READERS if config.name in POLICY_LOSS_SETTINGS else {}
    for name, readers in losses.items():
        value = getattr(config, name)
        if config.name not in readers and value != getattr(LossConfig, name):
            raise ConfigError(
                f"algorithm.loss.{name}={value} has no effect without algorithm.loss.name={' or '.join(readers)}; set "
                f"that, or remove algorithm.loss.{name}."
            )
    check_constant_length("algorithm.loss.", config.aggregation, config.constant_length)
    if 0 < config.dual_clip <= 1:
        raise ConfigError(f"algorithm.loss.dual_clip={config.dual_clip} must be above 1, or 0 for no dual clip.")
    if config.clip_cov_low >= config.clip_cov_high:
        raise ConfigError(
            f"algorithm.loss.clip_cov_low={config.clip_cov_low} is not below clip_cov_high={config.clip_cov_high}."
        )


def check_constant_length(section: str, aggregation: str, constant_length: int) -> None:
    """Raise ConfigError unless the aggregation that divides by `constant_length` has one, and no other.

    section: of the settings, with a dot at its end.
    """
    if aggregation == NORM and constant_length <= 0:
        raise ConfigError(
            f"{section}aggregation={NORM} divides by {section}constant_length, which is {constant_length}; set it, "
            "such as to the tokens of the longest response."
        )
    if aggregation != NORM and constant_length:
        raise ConfigError(
            f"{section}constant_length={constant_length} has no effect without {section}aggregation={NORM}; set that, "
            f"or remove {section}constant_length."
        )


def undecorated(function: str) -> ConfigError:
    """The error about a custom loss, `module:function`, that `policy_loss` has not registered."""
    return ConfigError(
        f"algorithm.loss.function={function!r} does not state its normaliser; decorate it with "
        "@policy_loss(NAME, aggregation=...)."
    )
