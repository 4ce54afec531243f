"""Check algorithm.*, critic, reward model and validation.* for contradictions."""

import re
from collections.abc import Iterable

from controller.algorithm.validation_metrics import is_possible, possible_metrics
from controller.config import Config
from controller.config.functions import check_function
from controller.config.model_files import read_model_files
from controller.preflight.data_checks import check_column_names
from controller.preflight.training_checks import OPTIMIZER_STEPS, check_warmup
from workers.errors import ConfigError
from workers.loss_config import check_policy_loss
from workers.model.rules.model_rules import check_value_head


def check_advantage(config: Config) -> None:
    """Raise ConfigError if other settings contradict the advantage estimator or a KL in the reward."""
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
    if algorithm.zero_variance_groups != "keep" and not algorithm.compares_groups:
        raise ConfigError(
            f"algorithm.zero_variance_groups={algorithm.zero_variance_groups} with algorithm.advantage="
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
    if algorithm.zero_variance_groups != "keep":
        raise ConfigError(
            f"algorithm.zero_variance_groups={algorithm.zero_variance_groups} with algorithm.kl_in_reward leaves out "
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
    """Raise ConfigError if other settings make the policy loss meaningless."""
    loss = config.algorithm.loss
    check_policy_loss(loss)
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
    """Raise ConfigError if the algorithm needs current samples but rollout.max_staleness is set."""
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
    if config.uses_reward_model and config.algorithm.zero_variance_groups == "replace":
        raise ConfigError(
            "algorithm.zero_variance_groups=replace needs rewards as samples come, but reward.model.path scores them "
            f"on the policy's ranks, which train meanwhile with {setting}; set zero_variance_groups=drop, or "
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
    """Raise ConfigError if `algorithm.loss.kl_correction` has no effect for the estimator, or is wrong for it."""
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
    """Raise ConfigError if REINFORCE++ gives advantages per token but the loss takes one per sequence."""
    if config.algorithm.loss.name == "gmpo" and config.uses_token_returns:
        raise ConfigError(
            "algorithm.loss.name=gmpo weighs a sequence by one advantage, and algorithm.gamma below 1 or "
            f"algorithm.kl_in_reward gives one to each token with algorithm.advantage={config.algorithm.advantage}; "
            "choose another loss, such as ppo_clip."
        )


def check_critic(config: Config) -> None:
    """Raise ConfigError at the first setting that a critic does not support."""
    if not config.uses_critic:
        return
    _check_alone(config)
    _check_warmup(config)


def _check_alone(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.loss.name == "gmpo":
        raise ConfigError(
            "algorithm.loss.name=gmpo weighs a sequence by one advantage and algorithm.advantage=gae gives one to each "
            "token; choose another loss, such as ppo_clip."
        )
    check_value_head(config.policy.parallel, "critic")


def check_reward_model(config: Config) -> None:
    """Raise ConfigError if reward.model.path cannot score the policy's sequences."""
    key, path = "reward.model.path", config.reward.model.path
    if not path:
        return
    check_value_head(config.policy.parallel, "reward model")
    made = str(read_model_files(path, key).description.get("architectures"))
    # A causal LM would be given a head of zeros, and every score would be 0.
    if "ForSequenceClassification" not in made:
        raise ConfigError(f"{key}={path}: its architecture is {made}. Take a sequence classification.")
    if config.reward.model.weight == 0:
        raise ConfigError(f"reward.model.weight={config.reward.model.weight} leaves the model without effect.")


def _check_warmup(config: Config) -> None:
    critic = config.critic
    if critic.warmup_steps >= config.run.steps:
        raise ConfigError(
            f"critic.warmup_steps={critic.warmup_steps} leaves the policy no step to learn in of "
            f"run.steps={config.run.steps}; lower it."
        )
    check_warmup("critic", critic.optimizer, config.critic_optimizer_steps, OPTIMIZER_STEPS)


COUNTED = re.compile(r"(?:.*/)?(?:pass|maj)@\d+")


def check_validation(config: Config) -> None:
    """Raise ConfigError for identical samples, or a pass@k or maj@n that needs more validation.samples."""
    name, samples = config.validation.keep_best, config.validation.samples
    if samples > 1 and config.validation.sampling.temperature == 0:
        raise ConfigError(
            f"validation.samples={samples} at validation.sampling.temperature=0 gives {samples} equal responses. "
            "Set samples to 1, or the temperature above 0."
        )
    if COUNTED.fullmatch(name) and not is_possible(name, samples, ()):
        raise ConfigError(
            f"validation.keep_best={name} is not a validation metric: validation.samples={samples} gives "
            f"{', '.join(possible_metrics(samples, ()))}; choose one of them, or change validation.samples."
        )


def check_keep_best(config: Config, parts: Iterable[str]) -> None:
    """Raise ConfigError if rewards with these parts lack the metric in validation.keep_best.

    Parts from an environment, a reward model or the overlong penalty are known only during the run.
    """
    name, samples = config.validation.keep_best, config.validation.samples
    adds = config.rollout.environment or config.uses_reward_model or config.reward.overlong_tokens
    if name and not adds and not is_possible(name, samples, parts):
        raise ConfigError(
            f"validation.keep_best={name} is not a validation metric: the reward gives "
            f"{', '.join(possible_metrics(samples, parts))}; choose one of them, or return {name} for every response."
        )
