"""Settings as Python has them, in the form in which a command line gives them.

{"policy": {"ranks": 2}} or {"policy.ranks": 2} --as_overrides--> ["policy.ranks=2"]
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from controller.config import TrainingConfig, load_as
from controller.config.file import settings
from workers.errors import ConfigError

Schema = TypeVar("Schema", bound=TrainingConfig)
Values = Mapping[str, Any] | Sequence[str]
"""Settings by their keys, whole or section by section; or texts `key.sub=value`."""


def load_settings(schema: type[Schema], config: str | Path | Mapping[str, Any] | None, overrides: Values) -> Schema:
    """The configuration of a file, a mapping, or (None) the overrides alone. Raises ConfigError as `load` does."""
    known = known_keys(schema)
    if isinstance(config, Mapping):
        return load_as(schema, None, [*as_overrides(config, known), *as_overrides(overrides, known)])
    return load_as(schema, config, as_overrides(overrides, known))


def known_keys(schema: type[TrainingConfig]) -> set[str]:
    """The keys of all settings."""
    return {found.key for found in settings(schema())}


def as_overrides(values: Values, known: Collection[str]) -> list[str]:
    """Each value as `key=value`, in YAML. known: the keys of all settings; a mapping below one of them is its value.

    Raises ConfigError for a value that is no setting's, such as an object.
    """
    if isinstance(values, str):
        raise ConfigError(f"overrides must be a list of key.sub=value or a mapping, not the text {values!r}.")
    if not isinstance(values, Mapping):
        return list(values)
    return [f"{key}={_yaml(key, value)}" for key, value in _leaves(values, known)]


def _leaves(values: Mapping[str, Any], known: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in known:
            yield from _leaves(value, known, f"{key}.")
        else:
            yield key, value


def _yaml(key: str, value: Any) -> str:
    plain = value.item() if hasattr(value, "item") else value  # a number of NumPy's, as sweeps draw them
    try:
        return yaml.safe_dump(str(plain) if isinstance(plain, Path) else plain, default_flow_style=True)
    except yaml.YAMLError:
        raise ConfigError(f"{key} must be a number, a text, true or false, not a {type(value).__name__}.") from None
