"""Check data.*: files exist, and their first records have the required columns."""

from collections.abc import Sequence
from typing import Any

from controller.config import Config
from controller.config.functions import check_function
from controller.config.model_files import read_model_files
from controller.config.sections import ImagePixelsConfig
from controller.data.data_files import is_on_disk
from controller.data.hub import check_split
from controller.data.records import iter_records
from workers.errors import ConfigError, DataError, Problems, check_together
from workers.user_code.task_sources import TASK, check_installed, package_of

_NAMES = """
input_ids loss_mask rollout_log_probs old_log_probs old_entropies reference_log_probs uid group_number sample
prompt_tokens prompt_hash prefix_hashes read_tokens cached_tokens response_tokens length turns truncated
seconds weight_version newest_weight_version reward greedy_reward advantages group_tokens old_values returns
held_back branches cut_tokens history_refused sample_number sample_tokens mini_batch_samples credit offsets
by_turn cut_thoughts kept_advantages teacher_prompt teacher_log_probs teacher_hidden teacher_top_ids
teacher_top_log_probs images
"""
RESERVED = frozenset(_NAMES.split())
"""Columns that every batch has."""


def check_data(config: Config) -> None:
    """Raise ConfigError, naming the settings, for data or a curriculum that the run cannot use."""
    data = config.data
    check_together(
        lambda: check_image_pixels(data.image_pixels),
        lambda: check_installed("rollout.environment", config.rollout.environment),
        lambda: _check_named_data(config),
        lambda: (
            check_function("data.curriculum", data.curriculum) if data.curriculum else None
        ),
        lambda: _check_sampler(config),
    )


def _check_named_data(config: Config) -> None:
    data = config.data
    key = "data.sources" if config.data.sources else "data.train"
    if bool(data.train) == bool(data.sources):
        raise ConfigError(
            "one of data.train and data.sources (several, by weight) must be set, and not both."
        )
    if not data.prompt_key:
        raise ConfigError(
            "data.prompt_key='': names no column. Set it to the column with the prompt."
        )
    problems = Problems()
    for path, weight in data.sources.items():
        with problems.collecting():
            if weight <= 0:
                raise ConfigError(
                    f"data.sources: the weight of {path} must be above 0, not {weight:g}."
                )
    for path in data.weights:
        with problems.collecting():
            _check_records(config, key, path)
    with problems.collecting():
        if data.validation:
            check_split("data.validation", data.validation)
            _check_records(config, "data.validation", data.validation)
    problems.raise_all()


def _check_records(config: Config, key: str, path: str) -> None:
    """Check the first record of a data set."""
    if is_elsewhere(config, path):
        return
    record = first_record(key, path, config.data.prompt_key, config.data.image_key)
    environment = config.rollout.environment
    source_key = config.data.source_key
    problems = Problems()
    with problems.collecting():
        _check_prompt(
            config, f"{key}: the prompts of {path}", record[config.data.prompt_key]
        )
    with problems.collecting():
        if package_of(environment) and TASK not in record:
            raise ConfigError(
                f"rollout.environment={environment}: {path} has other tasks. Set {key}={environment}."
            )
    with problems.collecting():
        if source_key and source_key not in record:
            raise ConfigError(
                f"{key}: the first record of {path} has no column data.source_key={source_key!r}."
            )
    problems.raise_all()


def _check_sampler(config: Config) -> None:
    if config.data.sampler and config.data.sources:
        raise ConfigError(
            f"data.sampler={config.data.sampler}: it chooses records of one source, and data.sources mixes "
            "several. Set data.train."
        )


def is_elsewhere(config: Config, path: str) -> bool:
    """Return whether a data set exists only on the described cluster."""
    return config.is_described and not is_on_disk(path)


def check_image_pixels(pixels: ImagePixelsConfig) -> None:
    """Raise ConfigError if no size is between the fewest and the most pixels."""
    if pixels.min > pixels.max:
        raise ConfigError(
            f"data.image_pixels.min={pixels.min}: above data.image_pixels.max={pixels.max}. Lower it."
        )


def _check_prompt(config: Config, subject: str, prompt: Any) -> None:
    if isinstance(prompt, list) and _lacks_template(config):
        raise ConfigError(
            f"{subject} are chat messages, but the tokenizer of model.path={config.model.path} has no chat "
            "template."
        )
    if isinstance(prompt, str) and config.data.system_prompt:
        raise ConfigError(
            f"{subject} are texts, but data.system_prompt goes before chat messages. Remove it."
        )


def _lacks_template(config: Config) -> bool:
    """Whether no chat template is known. A missing model is `check_model_files`' to refuse."""
    if config.model.chat_template:
        return False
    try:
        model = read_model_files(config.model.path, "model.path")
    except ConfigError:
        return False
    return not model.chat_template and (model.tokenizer or not config.is_described)


def first_record(
    key: str, path: str, prompt_key: str = "", image_key: str = ""
) -> dict[str, Any]:
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
            raise ConfigError(
                f"algorithm.loss.columns: the name {name!r} is reserved. Rename the records' column."
            )
        if names.count(name) > 1:
            raise ConfigError(f"algorithm.loss.columns names {name!r} twice. Name it once.")
