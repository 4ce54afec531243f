"""Counts: whether a step has the sequences and groups that the settings of micro- and mini-batches ask for."""

from controller.config import Config, TrainingConfig
from workers.errors import ConfigError


def check_counts(config: Config) -> None:
    """Raise ConfigError where a full step could not fill the micro-batches or mini-batches that are asked for."""
    smallest = config.mini_batch_sizes[-1]
    advice = "batch.mini_batches, or sample more"
    check_micro_batches(config, "min_micro_batches", smallest, f"{smallest} sequences of a mini-batch", advice)
    whole = config.sequences_per_step
    check_micro_batches(config, "forward_min_micro_batches", whole, f"{whole} sequences of a step", advice)
    groups = config.batch.prompts_per_step
    if config.balance.redeal_groups and groups < config.batch.mini_batches:
        raise ConfigError(
            f"balance.redeal_groups=true deals whole groups, and the {groups} of a step (batch.prompts_per_step) are "
            f"fewer than batch.mini_batches={config.batch.mini_batches}; lower mini_batches, or remove it."
        )
    if config.balance.redeal_groups and config.batch.epochs > 1:
        raise ConfigError(
            f"balance.redeal_groups=true would deal the same mini-batches in all of batch.epochs={config.batch.epochs} "
            "passes, which are to be drawn anew in each; remove one of the two."
        )


def check_micro_batches(config: TrainingConfig, name: str, sequences: int, of: str, advice: str) -> None:
    """Raise ConfigError if policy.`name` asks for more micro-batches than there are `sequences`.

    of: names these. advice: what else may be changed.
    """
    minimum, multiple = getattr(config.policy, name), config.balance.count_multiple
    least = -(-minimum // multiple) * multiple
    if least > sequences:
        raise ConfigError(
            f"policy.{name}={minimum} and balance.count_multiple={multiple} ask for {least} micro-batches, none of "
            f"them empty on every rank, of the {of}; lower them, or {advice}."
        )
