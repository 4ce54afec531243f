"""Checks of counts: a step has the sequences, groups and optimiser steps that the settings ask for."""

from controller.config import Config, TrainingConfig
from controller.preflight.training_checks import check_warmup
from workers.errors import ConfigError

OPTIMIZER_STEPS = "run.steps * batch.mini_batches * batch.epochs"
"""The settings that the optimiser steps of a run follow from."""


def check_counts(config: Config) -> None:
    """Raise ConfigError if a full step cannot fill every mini-batch, rank and micro-batch."""
    whole, smallest = config.sequences_per_step, config.mini_batch_sizes[-1]
    product = f"batch.prompts_per_step * rollout.samples_per_prompt = {whole} sequences"
    if config.batch.mini_batches > whole:
        raise ConfigError(
            f"batch.mini_batches={config.batch.mini_batches} is more than the {product} of a step; lower it."
        )
    if config.policy.ranks > smallest:
        raise ConfigError(
            f"policy.ranks={config.policy.ranks} is more than the {smallest} sequences of a mini-batch ({product} over "
            f"batch.mini_batches={config.batch.mini_batches}); lower ranks or mini_batches, or sample more."
        )
    advice = "batch.mini_batches, or sample more"
    check_micro_batches(config, "min_micro_batches", smallest, f"{smallest} sequences of a mini-batch", advice)
    check_micro_batches(config, "forward_min_micro_batches", whole, f"{whole} sequences of a step", advice)
    check_warmup("policy", config.policy.optimizer, config.total_optimizer_steps, OPTIMIZER_STEPS)


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
