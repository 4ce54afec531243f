"""Checks of a configuration with a critic or a reward model, beside those of `checks`."""

from controller.config import Config
from controller.config.model_files import read_model_files
from controller.preflight.count_checks import OPTIMIZER_STEPS
from controller.preflight.training_checks import check_warmup
from workers.errors import ConfigError
from workers.model.model_rules import check_value_head


def check_critic(config: Config) -> None:
    """Raise ConfigError at the first thing that a critic cannot do."""
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
    """Raise ConfigError unless reward.model.path, where it is set, can score the policy's sequences."""
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
