"""Checks of algorithm.*: advantages and losses that a combination of settings leaves without meaning."""

from controller.config import Config
from controller.config.functions import check_function
from controller.preflight.data_checks import check_column_names
from workers.errors import ConfigError
from workers.model import loss_rules


def check_advantage(config: Config) -> None:
    """Raise ConfigError for an advantage estimator or a KL in the reward that the other settings contradict."""
    algorithm, samples = config.algorithm, config.rollout.samples_per_prompt
    if algorithm.compares_groups and samples == 1:
        raise ConfigError(
            f"rollout.samples_per_prompt=1 leaves algorithm.advantage={algorithm.advantage} nothing to compare: every "
            "advantage is 0; set it to 2 or more."
        )
    if algorithm.advantage == "pass_at_k" and samples <= algorithm.pass_k:
        raise ConfigError(
            f"algorithm.pass_k={algorithm.pass_k} is not below rollout.samples_per_prompt={samples}: every advantage "
            "is 0; lower it, or sample more."
        )
    if algorithm.groups_without_signal != "keep" and not algorithm.compares_groups:
        raise ConfigError(
            f"algorithm.groups_without_signal={algorithm.groups_without_signal} with algorithm.advantage="
            f"{algorithm.advantage} leaves out sequences that have an advantage; remove it."
        )
    if algorithm.advantage == "maxrl" and config.reward.overlong_tokens:
        raise ConfigError(
            "algorithm.advantage=maxrl takes rewards as rates of success, and reward.overlong_tokens makes them "
            "negative; remove one of the two."
        )
    if algorithm.kl_in_reward.coefficient:
        _check_kl_in_reward(config)


def _check_kl_in_reward(config: Config) -> None:
    algorithm, horizon = config.algorithm, config.algorithm.kl_in_reward.horizon
    if algorithm.groups_without_signal != "keep":
        raise ConfigError(
            f"algorithm.groups_without_signal={algorithm.groups_without_signal} with algorithm.kl_in_reward leaves out "
            "sequences that the penalty gives an advantage; remove it, or put the KL into the loss."
        )
    if algorithm.advantage == "maxrl":
        raise ConfigError(
            "algorithm.advantage=maxrl takes rewards as rates of success, and algorithm.kl_in_reward makes them "
            "negative; put the KL into the loss (algorithm.loss.kl_coefficient)."
        )
    if algorithm.kl_in_reward.target and horizon < config.sequences_per_step:
        raise ConfigError(
            f"algorithm.kl_in_reward.horizon={horizon} is below the {config.sequences_per_step} sequences of a step, "
            "so that the weight would jump; raise it, such as to 20 steps."
        )


def check_loss(config: Config) -> None:
    """Raise ConfigError for a policy loss that the other settings leave without meaning."""
    loss = config.algorithm.loss
    loss_rules.check_loss(loss)
    if loss.name == "custom":
        check_function("algorithm.loss.function", loss.function)
        check_column_names(config.loss_columns)
    if loss.name in ("clip_cov", "kl_cov") and config.old_log_probs == "update":
        raise ConfigError(
            f"algorithm.loss.name={loss.name} chooses tokens by their old log-probs, which one update a step does not "
            "compute; set batch.mini_batches or batch.epochs to 2 or more."
        )
    if config.batch.epochs > 1 and loss.name == "reinforce":
        raise ConfigError(
            "algorithm.loss.name=reinforce assumes samples of the current policy, and "
            f"batch.epochs={config.batch.epochs} trains on them again after updates; set epochs to 1, or another loss."
        )
    _check_staleness(config)
    _check_sampled_ratios(config)
    _check_kl_correction(config)
    _check_token_returns(config)


def _check_staleness(config: Config) -> None:
    """Raise ConfigError if the algorithm needs samples of the current weights and rollout.max_staleness is set."""
    loss, setting = config.algorithm.loss, f"rollout.max_staleness={config.rollout.max_staleness}"
    if not config.rollout.max_staleness:
        return
    if loss.name == "reinforce" and not loss.rollout_correction.is_on:
        raise ConfigError(
            f"algorithm.loss.name=reinforce assumes samples of the current policy, but {setting} makes them of older "
            "ones; set algorithm.loss.rollout_correction.weights=token, or another loss."
        )
    if config.algorithm.advantage == "remax":
        raise ConfigError(
            "algorithm.advantage=remax compares samples with a greedy response of the same weights, but with "
            f"{setting} these change meanwhile; set rollout.max_staleness=0, or another estimator such as rloo."
        )
    if config.uses_reward_model and config.algorithm.groups_without_signal == "replace":
        raise ConfigError(
            "algorithm.groups_without_signal=replace needs rewards as samples come, but reward.model.path scores them "
            f"on the policy's ranks, which train meanwhile with {setting}; set groups_without_signal=drop, or "
            "rollout.max_staleness=0."
        )


def _check_sampled_ratios(config: Config) -> None:
    """Raise ConfigError if ratios to the engines' log-probs would not be 1 at equal weights."""
    sampling, correction = config.rollout.sampling, config.algorithm.loss.rollout_correction
    readers = {
        f"rollout.max_staleness={config.rollout.max_staleness}": config.old_log_probs == "sampler",
        "algorithm.loss.rollout_correction": correction.is_on,
    }
    for reader in (name for name, reads in readers.items() if reads and not sampling.log_probs_are_whole):
        raise ConfigError(
            f"rollout.sampling.{sampling.cuts[0]}: at temperature={sampling.temperature:g} engines give log-probs of "
            f"the kept tokens alone, and the ratios of {reader} would not be 1 at equal weights. Set "
            "rollout.sampling.temperature=1, or sample without a cut."
        )


def _check_kl_correction(config: Config) -> None:
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


def _check_token_returns(config: Config) -> None:
    """Raise ConfigError if REINFORCE++ gives one advantage to each token and the loss takes one a sequence."""
    if config.algorithm.loss.name == "gmpo" and config.uses_token_returns:
        raise ConfigError(
            "algorithm.loss.name=gmpo weighs a sequence by one advantage, and algorithm.gamma below 1 or "
            f"algorithm.kl_in_reward gives one to each token with algorithm.advantage={config.algorithm.advantage}; "
            "choose another loss, such as ppo_clip."
        )
