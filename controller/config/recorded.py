"""Read settings back from a run's folder, whichever command made it."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from controller.config.offline import PreferencesConfig, RewardTrainingConfig, SftConfig
from controller.config.schema import Config, load_as
from controller.config.training import TrainingConfig
from controller.config.yaml_text import yaml_events
from workers.errors import ConfigError

OURS = "workers.reward_functions:"
SCHEMAS: tuple[type[TrainingConfig], ...] = (
    Config,
    SftConfig,
    PreferencesConfig,
    RewardTrainingConfig,
)


def load_recorded(path: Path) -> TrainingConfig:
    """Read `config.yaml` by the schema that has all its sections, and most of its settings of data.

    Raises ConfigError as `load` does.
    """
    try:
        # A pipe would be waited for.
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        deque(yaml_events(text), maxlen=0)  # refuses what is nested too deeply for PyYAML
        read = yaml.safe_load(text)
        sections = set(read)
        data = set(read.get("data") or ())
    except (AttributeError, OSError, RecursionError, TypeError, ValueError, yaml.YAMLError):
        # loading says what is wrong
        sections = set()
        data = set()
    unknown: dict[type[TrainingConfig], int] = {}
    for schema in SCHEMAS:
        config: Any = schema()
        if sections <= {item.name for item in fields(config)}:
            unknown[schema] = len(data - vars(config.data).keys())
    return load_as(min(unknown, key=unknown.__getitem__, default=Config), path)


def check_trusted(
    run: Path, functions: Iterable[str], overrides: Sequence[str], fix: str
) -> None:
    """Raise ConfigError if a run's config.yaml names functions that are neither ours nor in `overrides`.

    fix: instruction for the message.
    """
    override_values = [override.partition("=")[2] for override in overrides]
    if untrusted_names := [
        name
        for name in functions
        if name and not name.startswith(OURS) and name not in override_values
    ]:
        raise ConfigError(
            f"{run / 'config.yaml'} names code that would run here: {', '.join(untrusted_names)}. Read it, "
            f"then {fix}."
        )
