"""Settings read back from the folder of a run, whichever command has made it."""

from dataclasses import fields
from pathlib import Path

import yaml

from controller.config.offline import PreferencesConfig, SftConfig
from controller.config.schema import Config, load_as
from controller.config.training import TrainingConfig

SCHEMAS: tuple[type[TrainingConfig], ...] = (Config, SftConfig, PreferencesConfig)


def load_recorded(path: Path) -> TrainingConfig:
    """The settings of `config.yaml`, by the first schema that has all its sections.

    Raises ConfigError as `load` does.
    """
    try:
        sections = set(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError, yaml.YAMLError):
        return load_as(Config, path)  # which says what is wrong
    found = (schema for schema in SCHEMAS if sections <= {item.name for item in fields(schema)})  # type: ignore[arg-type]
    return load_as(next(found, Config), path)
