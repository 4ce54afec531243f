"""Checks of a policy loss beside those of `checks`: the gradient of its KL, and advantages that it cannot take."""

from controller.config import Config
from workers.errors import ConfigError


def check_kl_correction(config: Config) -> None:
    """Raise ConfigError if `algorithm.loss.kl_correction` does nothing for the estimator, or is not right for it."""
    correction, estimator = config.algorithm.loss.kl_correction, config.algorithm.loss.kl_estimator
    if correction == "straight_through" and estimator == "k2":
        raise ConfigError(
            "algorithm.loss.kl_correction=straight_through takes the gradient of k2, which is that of "
            "algorithm.loss.kl_estimator=k2 already; remove it."
        )
    if correction == "importance" and estimator not in ("k1", "k3"):
        raise ConfigError(
            "algorithm.loss.kl_correction=importance is for estimates whose mean is the KL, and "
            f"algorithm.loss.kl_estimator={estimator} is none; set k1 or k3."
        )


def check_token_returns(config: Config) -> None:
    """Raise ConfigError if REINFORCE++ gives one advantage to each token and the loss takes one a sequence."""
    if config.algorithm.loss.name == "gmpo" and config.uses_token_returns:
        raise ConfigError(
            "algorithm.loss.name=gmpo weighs a sequence by one advantage, and algorithm.gamma below 1 or "
            f"algorithm.kl_in_reward gives one to each token with algorithm.advantage={config.algorithm.advantage}; "
            "choose another loss, such as ppo_clip."
        )
