"""Convert settings given as Python values into command-line form.

{"policy": {"data_parallel": 2}} or {"policy.data_parallel": 2} --as_overrides--> ["policy.data_parallel=2"]
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from controller.config import TrainingConfig, load_as
from controller.config.file import leaves, settings
from controller.config.yaml_text import show_value
from workers.errors import ConfigError

Schema = TypeVar("Schema", bound=TrainingConfig)
Values = Mapping[str, Any] | Sequence[str]
"""Settings by key, nested or dotted, or a sequence of `key.sub=value`."""


def load_settings(
    schema: type[Schema], config: str | Path | Mapping[str, Any] | None, overrides: Values
) -> Schema:
    """Read a file, a mapping, or (None) only the overrides. Raises ConfigError as `load`."""
    keys = known_keys(schema)
    check_type("config", config, str, Path, Mapping, type(None))
    if isinstance(config, Mapping):
        return load_as(
            schema, None, [*as_overrides(config, keys), *as_overrides(overrides, keys)]
        )
    return load_as(schema, config, as_overrides(overrides, keys))


def known_keys(schema: type[TrainingConfig]) -> set[str]:
    return {setting.key for setting in settings(schema())}


def as_overrides(values: Values, keys: Collection[str]) -> list[str]:
    """Return each value as `key=value`, in YAML. keys: all keys. A mapping below a key is its value.

    Raises ConfigError for a value that YAML cannot represent.
    """
    if isinstance(values, Mapping):
        try:
            return [f"{key}={_yaml(key, value)}" for key, value in leaves(values, keys)]
        except RecursionError:
            raise ConfigError(
                "a mapping of settings holds itself, or is nested too deep."
            ) from None
    return check_list(
        "overrides",
        values,
        lambda value: isinstance(value, str),
        "a list of key.sub=value, or a mapping",
    )


def check_list(
    name: str, values: Any, allowed: Callable[[Any], bool], wanted: str
) -> list[Any]:
    """Return an argument as a list. Raises ConfigError unless each item is allowed."""
    entries = (
        list(values)
        if isinstance(values, Iterable) and not isinstance(values, (str, bytes))
        else [None]
    )
    if not all(map(allowed, entries)):
        raise ConfigError(f"{name}={show_value(values)}: expected {wanted}.")
    return entries


def check_type(name: str, value: Any, *types: type) -> None:
    """Raise ConfigError unless the argument is of one of `types`."""
    if not isinstance(value, types):
        wanted = " or ".join(one.__name__ for one in types)
        raise ConfigError(
            f"{name}={show_value(value)}: expected {wanted}, not {type(value).__name__}."
        )


class _Dumper(yaml.SafeDumper):
    """Quotes every text: OmegaConf reads `1e3` as a number, and PyYAML would not quote it."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'),
)


def _yaml(key: str, value: Any) -> str:
    # A NumPy number, as from a sweep.
    plain = value.item() if getattr(value, "ndim", 1) == 0 else value
    try:
        return yaml.dump(
            str(plain) if isinstance(plain, Path) else plain,
            Dumper=_Dumper,
            default_flow_style=True,
        )
    except (yaml.YAMLError, ValueError):
        raise ConfigError(
            f"{key} must be a number, a text, true or false, not a {type(value).__name__}."
        ) from None
