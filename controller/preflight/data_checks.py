"""Check data.*: files exist, and their first records have the required columns."""

from collections.abc import Sequence
from typing import Any

from controller.config import Config
from controller.config.functions import check_function
from controller.config.model_files import ModelFiles
from controller.config.sections import ImagePixelsConfig
from controller.data.data_files import is_on_disk
from controller.data.hub import check_split
from controller.data.records import iter_records
from workers.errors import ConfigError, DataError
from workers.user_code.task_sources import TASK, check_installed, package_of

_NAMES = """
input_ids loss_mask rollout_log_probs old_log_probs old_entropies reference_log_probs uid group_number sample
prompt_tokens prompt_hash prefix_hashes read_tokens cached_tokens response_tokens length turns truncated
seconds weight_version newest_weight_version reward greedy_reward advantages group_tokens old_values returns
held_back branches cut_tokens history_refused sample_number sample_tokens mini_batch_samples credit offsets by_turn
cut_thoughts kept_advantages teacher_prompt teacher_log_probs teacher_hidden teacher_top_ids teacher_top_log_probs
images
"""
RESERVED = frozenset(_NAMES.split())
"""Columns that every batch has."""


def check_data(config: Config, model: ModelFiles) -> None:
    """Raise ConfigError, naming the setting, for data or a curriculum that the run cannot use."""
    _check_sources(config)
    if not config.data.prompt_key:
        raise ConfigError("data.prompt_key='': names no column. Set it to the column with the prompt.")
    check_image_pixels(config.data.image_pixels)
    check_installed("rollout.environment", config.rollout.environment)
    paths = [("data.sources" if config.data.sources else "data.train", path) for path in config.data.weights]
    if config.data.validation:
        check_split("data.validation", config.data.validation)
        paths.append(("data.validation", config.data.validation))
    for key, path in paths:
        if is_elsewhere(config, path):
            continue
        record = first_record(key, path, config.data.prompt_key, config.data.image_key)
        _check_prompt(config, model, f"{key}: the prompts of {path}", record[config.data.prompt_key])
        if package_of(config.rollout.environment) and TASK not in record:
            environment = config.rollout.environment
            raise ConfigError(f"rollout.environment={environment}: {path} has other tasks. Set {key}={environment}.")
        if config.data.source_key and config.data.source_key not in record:
            raise ConfigError(
                f"{key}: the first record of {path} has no column data.source_key={config.data.source_key!r}."
            )
    if config.data.curriculum:
        check_function("data.curriculum", config.data.curriculum)
    if config.data.sampler and config.data.sources:
        raise ConfigError(
            f"data.sampler={config.data.sampler}: it chooses records of one source, and data.sources mixes several. "
            "Set data.train."
        )


def is_elsewhere(config: Config, path: str) -> bool:
    """Return whether a data set exists only on the described cluster."""
    return config.is_described and not is_on_disk(path)


def check_image_pixels(pixels: ImagePixelsConfig) -> None:
    """Raise ConfigError if no size is between the fewest and the most pixels."""
    if pixels.min > pixels.max:
        raise ConfigError(f"data.image_pixels.min={pixels.min}: above data.image_pixels.max={pixels.max}. Lower it.")


def _check_sources(config: Config) -> None:
    for path, weight in config.data.sources.items():
        if weight <= 0:
            raise ConfigError(f"data.sources: the weight of {path} must be above 0, not {weight:g}.")
    if bool(config.data.train) == bool(config.data.sources):
        raise ConfigError("one of data.train and data.sources (several, by weight) must be set, and not both.")


def _check_prompt(config: Config, model: ModelFiles, which: str, prompt: Any) -> None:
    has_template = bool(model.chat_template or config.model.chat_template)
    if isinstance(prompt, list) and not has_template and (model.tokenizer or not config.is_described):
        raise ConfigError(
            f"{which} are chat messages, but the tokenizer of model.path={config.model.path} has no chat template."
        )
    if isinstance(prompt, str) and config.data.system_prompt:
        raise ConfigError(f"{which} are texts, but data.system_prompt goes before chat messages. Remove it.")


def first_record(key: str, path: str, prompt_key: str = "", image_key: str = "") -> dict[str, Any]:
    """Read the first record of a data set. Raises ConfigError, naming `key`, if no record has a prompt."""
    try:
        check_installed(key, path)
        record = next(iter_records(path, prompt_key, image_key), None)
    except DataError as error:
        raise ConfigError(f"{key}: {error}") from None
    if record is None:
        raise ConfigError(f"{key}: {path} has no records.")
    return record


def check_column_names(names: Sequence[str]) -> None:
    for name in names:
        if name in RESERVED:
            raise ConfigError(f"algorithm.loss.columns: the name {name!r} is reserved. Rename the records' column.")
        if names.count(name) > 1:
            raise ConfigError(f"algorithm.loss.columns names {name!r} twice. Name it once.")
