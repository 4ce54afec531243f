"""Checks of algorithm.loss.columns: the columns of the records that a loss of a user's own reads."""

from collections.abc import Sequence

from controller.config import Config
from controller.records import Record
from workers.errors import ConfigError

OF_A_BATCH = frozenset(
    (
        *("input_ids", "loss_mask", "rollout_log_probs", "old_log_probs", "old_entropies", "reference_log_probs"),
        *("uid", "sample", "prompt_tokens", "response_tokens", "length", "turns", "truncated", "seconds"),
        *("weight_version", "newest_weight_version", "reward", "greedy_reward", "advantages", "group_tokens"),
        *("old_values", "returns", "held_back"),
    )
)
"""The columns that a batch has of itself."""


def check_column_names(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that stands for something else in a batch, or stands there twice."""
    for name in names:
        if name in OF_A_BATCH:
            raise ConfigError(
                f"algorithm.loss.columns: a batch has a column {name!r} of its own; rename that of the records."
            )
        if names.count(name) > 1:
            raise ConfigError(f"algorithm.loss.columns names {name!r} twice; name it once.")


def check_columns_are_there(config: Config, which: str, record: Record) -> None:
    """Raise ConfigError unless `record`, described by `which`, has every column of algorithm.loss.columns."""
    for name in config.loss_columns:
        if name not in record:
            raise ConfigError(f"{which} has no column {name!r}, which algorithm.loss.columns names.")
