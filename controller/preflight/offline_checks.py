"""Check settings of training on given sequences, in addition to `training_checks`."""

from controller.config.conditions import check_settings_have_effect
from controller.config.offline import OfflineConfig, SftConfig
from controller.data.hub import check_split
from controller.preflight.data_checks import check_image_pixels, first_record
from controller.preflight.tracker_checks import check_trackers
from controller.preflight.training_checks import (
    check_attention,
    check_caps,
    check_micro_batches,
    check_model_files,
    check_one_policy,
    check_optimizer,
    check_parallel,
    check_run,
)
from workers.config.loss import check_constant_length
from workers.errors import ConfigError, Problems, check_together


def check_offline(config: OfflineConfig) -> None:
    """Raise one error for each independent part that cannot work or has no effect, together, in under a
    second.
    """
    check_together(
        lambda: check_offline_settings(config),
        lambda: check_attention(config),
        lambda: check_parallel(config),
        lambda: check_model_files(config),
        lambda: _check_data(config),
        lambda: check_trackers(config),
    )


def check_offline_settings(config: OfflineConfig) -> None:
    """Run the part of `check_offline` that does not read models or data."""
    # Without either number it follows from the data.
    steps = config.policy.optimizer.total_steps or config.run.steps
    longest = f"data.max_tokens={config.data.max_tokens} tokens"
    check_together(
        lambda: check_settings_have_effect(config),
        lambda: check_run(config),
        lambda: check_one_policy(config),
        lambda: _check_batch(config),
        lambda: check_optimizer(config, "policy", steps, "run.steps"),
        lambda: check_caps(
            config, config.limits.values(), config.longest_sequence, longest
        ),
        lambda: _check_loss_and_head(config),
    )


def _check_loss_and_head(config: OfflineConfig) -> None:
    if isinstance(config, SftConfig):
        check_constant_length("loss.", config.loss.aggregation, config.loss.constant_length)
    if config.head == "value" and config.model.lora.rank:
        raise ConfigError(
            f"model.lora.rank={config.model.lora.rank}: a reward model's head has no adapter. Set 0."
        )


def _check_batch(config: OfflineConfig) -> None:
    sequences = config.records_per_step * config.sequences_per_record
    if config.policy.data_parallel > sequences:
        raise ConfigError(
            f"policy.data_parallel={config.policy.data_parallel} is more than the {sequences} sequences of "
            "a step. Lower it, or raise the batch."
        )
    for name in ("min_micro_batches", "forward_min_micro_batches"):
        check_micro_batches(
            config, name, sequences, f"{sequences} sequences of a step", "raise the batch"
        )


def _check_data(config: OfflineConfig) -> None:
    problems = Problems()
    with problems.collecting():
        check_image_pixels(config.data.image_pixels)
    with problems.collecting():
        if not config.data.train:
            raise ConfigError("data.train must be set.")
        first_record("data.train", config.data.train)
    with problems.collecting():
        if config.data.validation:
            check_split("data.validation", config.data.validation)
            first_record("data.validation", config.data.validation)
    problems.raise_all()
