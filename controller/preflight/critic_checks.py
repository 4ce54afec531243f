"""Checks of a configuration with a critic or a reward model, beside those of `checks`."""

from controller.config import Config
from controller.config.model_files import ModelFiles, read_model_files
from controller.preflight.count_checks import OPTIMIZER_STEPS
from controller.preflight.model_types import CAUSAL, VALUE
from controller.preflight.training_checks import check_same_vocabulary, check_warmup
from controller.preflight.weights import SCORE
from workers.errors import ConfigError
from workers.model.model_rules import check_value_head


def check_critic(config: Config, policy: ModelFiles) -> None:
    """Raise ConfigError at the first thing that a critic cannot do. policy: the files of model.path."""
    if not config.uses_critic:
        return
    _check_alone(config)
    _check_warmup(config)
    if config.critic.path:
        check_same_vocabulary(config, policy, "critic.path", config.critic.path, CAUSAL, VALUE)


def _check_alone(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.loss.name == "gmpo":
        raise ConfigError(
            "algorithm.loss.name=gmpo weighs a sequence by one advantage and algorithm.advantage=gae gives one to each "
            "token; choose another loss, such as ppo_clip."
        )
    check_value_head(config.policy.parallel, "critic")


def check_reward_model(config: Config, policy: ModelFiles) -> None:
    """Raise ConfigError unless reward.model.path, where it is set, can score the policy's sequences."""
    key, path = "reward.model.path", config.reward.model.path
    if not path:
        return
    check_value_head(config.policy.parallel, "reward model")
    made = read_model_files(path, key).description.get("architectures") or []
    # A causal LM would be given a head of zeros, and every score would be 0.
    if not any(name.endswith("ForSequenceClassification") for name in made):
        raise ConfigError(f"{key}={path} is {' or '.join(made) or 'of no architecture'}, not sequence classification.")
    check_same_vocabulary(config, policy, key, path, VALUE, output=SCORE)
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
