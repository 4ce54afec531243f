"""Read a configuration: YAML and `key.sub=value`, checked against nested dataclasses.

file, then overrides --> keys known? --> types? --> merged (OmegaConf) --> all set? --> ranges? --> object
"""

import pickle
import re
import sys
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from controller.config.aliases import previous_name
from controller.config.suggestions import suggestion
from controller.config.user_paths import with_user_paths
from controller.config.value_types import TYPE_NAMES, Biases, Numbers, Options, is_of_type
from controller.config.yaml_text import check_scalars, read_yaml, show_value, yaml_problem
from workers.config.engine_range import Count
from workers.errors import ConfigError, Problems, raise_all

Schema = TypeVar("Schema")
# sizes without a declared maximum: anything larger is a slip
LARGEST_INT = 10**9
LARGEST_FLOAT = 1e6


@dataclass(frozen=True)
class Setting:
    """One key of the schema. `default` is MISSING ("???") for a required key."""

    key: str
    type: type
    default: Any
    doc: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] | None = None
    exclusive_minimum: bool = False
    exclusive_maximum: bool = False
    only_with: tuple[str, ...] = ()

    @property
    def required(self) -> bool:
        return bool(self.default == MISSING)

    @property
    def follows(self) -> bool:
        """Whether the default refers to another key, `${that.key}`."""
        return isinstance(self.default, str) and self.default.startswith("${")

    @property
    def range(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        bounds = []
        if self.minimum is not None:
            bounds.append(
                f"{'above' if self.exclusive_minimum else 'at least'} {self.minimum:,}"
            )
        if self.maximum is not None:
            bounds.append(
                f"{'below' if self.exclusive_maximum else 'at most'} {self.maximum:,}"
            )
        return " and ".join(bounds)

    @property
    def highest(self) -> float:
        """Largest allowed number, apart from an exclusive maximum."""
        if self.maximum is not None:
            return self.maximum
        return LARGEST_INT if self.type is int else LARGEST_FLOAT

    @property
    def type_name(self) -> str:
        """Return the type, as reference pages show it."""
        return "int or MIN..MAX" if self.type == Count else self.type.__name__

    def allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.type in (Numbers, Biases):
            return all(abs(number) <= LARGEST_FLOAT for number in value.values())
        if not isinstance(value, (int, float)):
            return True
        high = self.highest
        low = -high if self.minimum is None else self.minimum
        excluded = (self.exclusive_minimum and value == low) or (
            self.exclusive_maximum and value == high
        )
        return low <= value <= high and not excluded


def settings(
    section: Any, prefix: str = "", only_with: tuple[str, ...] = ()
) -> Iterator[Setting]:
    """Yield every key of a section instance, in order of declaration.

    only_with: conditions of the whole section.
    """
    pairs = [
        pair for base in type(section).__mro__ for pair in vars(base).get("only_with", ())
    ]
    for item in fields(section):
        value = getattr(section, item.name)
        own_conditions = [
            condition for condition, names in pairs if item.name in names.split(", ")
        ]
        conditions = (
            *only_with,
            *(
                prefix[:-1] + condition if condition.startswith(".") else condition
                for condition in own_conditions
            ),
        )
        if is_dataclass(value):
            yield from settings(value, f"{prefix}{item.name}.", conditions)
        else:
            yield Setting(
                prefix + item.name,
                cast(type, item.type),
                value,
                **item.metadata,
                only_with=conditions,
            )


def leaves(
    content: Mapping[Any, Any], keys: Collection[str] = (), prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (full key, value) of nested mappings. A mapping below a key in `keys` is its value."""
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in keys:
            yield from leaves(value, keys, f"{key}.")
        else:
            yield key, value


def value_of(config: Any, key: str) -> Any:
    """Return the value of a full key, `policy.optimizer.beta1`."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def read(
    schema: type[Schema], files: Sequence[str | Path], overrides: Sequence[str]
) -> Schema:
    """Merge the schema's defaults, YAML files and `key.sub=value` overrides. Later ones win. `~key.sub` and
    `key.sub=null` take back what was set before.

    Raises ConfigError, in one line: missing or invalid file, unknown key, wrong type, out of range, or
    required key not set.
    """
    known_settings = _known_settings(cast(Hashable, schema))
    parts = [(f"{file}: ", read_yaml(Path(file))) for file in files]
    removals = []
    for override in overrides:
        if removed := _removed_setting(override, known_settings):
            removals.append((len(parts), removed))
        else:
            parts.append(("", _read_override(override, known_settings)))
    merged = pickle.loads(_pickled_defaults(cast(Hashable, schema)))
    problems = Problems()
    for source, part in parts:
        with problems.collecting():
            _follow_renames(part, known_settings, source)
            _convert_lists(part, known_settings, source)
            _check_keys_and_types(part, known_settings, source)
    problems.raise_all()
    for count, key in removals:
        _remove(key, [part for _, part in parts[:count]])
    _merge(merged, [part for _, part in parts], known_settings)
    config = _to_object(merged, known_settings)
    _check_ranges(config, known_settings)
    return cast(Schema, config)


@cache
def _known_settings(schema: Hashable) -> dict[str, Setting]:
    """Return the settings of a schema by key."""
    return {setting.key: setting for setting in settings(cast(Any, schema)())}


@cache
def _pickled_defaults(schema: Hashable) -> bytes:
    """Return the schema's defaults. Making them takes 60 ms, a deep copy 12, unpickling 1.4."""
    return pickle.dumps(OmegaConf.structured(schema))


def _merge(
    merged: Any, parts: Sequence[DictConfig], known_settings: Mapping[str, Setting]
) -> None:
    """Merge all parts in place. Numbers and biases by name replace those before; other mappings are merged.

    One call for all parts: each call walks the whole tree, and `OmegaConf.merge` copies it too.
    """
    try:
        OmegaConf.unsafe_merge(merged, *parts)
    except OmegaConfBaseException as error:
        raise _refusal(error) from None
    for key, setting in known_settings.items():
        if setting.type in (Numbers, Biases):
            for value in (OmegaConf.select(part, key) for part in parts):
                if value is not None:
                    OmegaConf.update(merged, key, value, merge=False)


def _refusal(error: OmegaConfBaseException, key: str = "") -> ConfigError:
    problem = _PROBLEMS.get(type(error).__name__) or str(error.msg or error).splitlines()[0]
    return ConfigError(f"{error.full_key or key}: {problem}. Correct the value.")


_PROBLEMS = {
    "InterpolationKeyError": "its ${...} names no setting",
    "InterpolationToMissingValueError": "its ${...} names a setting that is not set",
    "ValidationError": "its ${...} names a setting of another type",
    "InterpolationValidationError": "its ${...} names a setting of another type",
    "InterpolationResolutionError": "its ${...} leads to itself",
}
"""OmegaConf's messages speak of keys and nodes, and some end with a URL."""


def _follow_renames(
    part: DictConfig, known_settings: Mapping[str, Setting], source: str
) -> None:
    """Replace the previous version's settings in place, and print one line if any has a new name.

    A setting that has become a choice still reads its booleans.
    """
    new_names = []
    for key, value in list(
        _leaves(cast(dict[str, Any], OmegaConf.to_container(part)), known_settings, source)
    ):
        if key in known_settings and (
            known_settings[key].type is not str or not isinstance(value, bool)
        ):
            continue
        row = previous_name(key, known_settings)
        if row is None:
            continue
        new = row.values.get(show_value(value))
        if new is None and row.here and OmegaConf.select(part, row.here[0]) is None:
            new = {row.here[0]: value}
            new_names.append(f"{key} is now {row.here[0]}")
        if new is not None:
            section, _, name = key.rpartition(".")
            del OmegaConf.select(part, section)[name]
            for ours, setting in new.items():
                OmegaConf.update(part, ours, setting, force_add=True)
    if new_names:
        rest = (
            f", and {len(new_names) - 3} more in docs/migration.md"
            if len(new_names) > 3
            else ""
        )
        _print_once(
            f"{source}{', '.join(new_names[:3])}{rest}. The next version refuses the old names."
        )


NAMES_IN_A_TEXT = ("model.lora.target_modules", "model.lora.target_parameters")
"""Settings that are names separated by commas, and may be a list."""


def _convert_lists(
    part: DictConfig, known_settings: Mapping[str, Setting], source: str
) -> None:
    """Read one text or number as a list of it, and a list as a text of names, in place.

    As engines and peft read `stop: "</a>"` and `target_modules: [q_proj, v_proj]`.
    """
    for key, value in list(
        _leaves(cast(dict[str, Any], OmegaConf.to_container(part)), known_settings, source)
    ):
        if key not in known_settings or (
            isinstance(value, str) and (not value or value == MISSING or "${" in value)
        ):
            continue
        kind = known_settings[key].type
        if get_origin(kind) is list and is_of_type(value, get_args(kind)[0]):
            OmegaConf.update(part, key, [value])
        elif key in NAMES_IN_A_TEXT and value and is_of_type(value, list[str]):
            OmegaConf.update(part, key, ",".join(map(str, value)))


@cache
def _print_once(line: str) -> None:
    print(line, file=sys.stderr)


def _removed_setting(override: str, known_settings: Mapping[str, Setting]) -> str:
    """Return the setting or section that `~key` or `key=null` removes, or an empty text. Raises ConfigError
    for an unknown one.
    """
    key, _, value = override.partition("=")
    if override.startswith("~") and not value:
        key = key[1:]
    elif value.strip() != "null" or key not in known_settings:
        return ""
    if key not in known_settings and key not in _sections(tuple(known_settings)):
        raise ConfigError(f"~{key}: not a setting; {suggestion(key, list(known_settings))}")
    return key


def _remove(key: str, parts: Sequence[DictConfig]) -> None:
    section, _, name = key.rpartition(".")
    for part in parts:
        node = OmegaConf.select(part, section) if section else part
        if node is not None and name in node:
            del node[name]


def _read_override(override: str, known_settings: Mapping[str, Setting]) -> DictConfig:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*=.*", override, re.DOTALL):
        raise ConfigError(
            f"{override!r} is not an override. Write key.sub=value, or ~key.sub."
        )
    key, _, value = override.partition("=")
    for name, setting in known_settings.items():
        if setting.type in (Numbers, Biases) and key.startswith(f"{name}."):
            raise ConfigError(
                f"{key}: {name} is given whole, in place of the one before: {name}='{{NAME: NUMBER}}'."
            )
    if not value.strip() and key in known_settings and known_settings[key].type is str:
        # As a shell gives `key=` and `key=""`. YAML would read it as null.
        override = f"{key}=''"
    try:
        # YAML would read the brace of a reference within a list or a mapping as another mapping.
        if (
            key in known_settings
            and _holds_several(known_settings[key])
            and "${" in value.lstrip()[1:]
        ):
            raise _no_reference(key)
        check_scalars(value, key=key)
        return OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeEncodeError) as error:
        if re.search(r"(^|[\[{:, ])\?\?\?($|[\]}, ])", value):  # which YAML reads as a key
            raise _not_set(key) from None
        problem = f"{show_value(value)} is not valid here ({yaml_problem(error)})"
        raise ConfigError(
            f"{key}: the value {problem}. Quote a text, as in {key}='\"...\"'."
        ) from None
    except RecursionError:
        raise ConfigError(f"{key}: the value is nested too deep to be read.") from None


def _check_keys_and_types(
    part: DictConfig, known_settings: Mapping[str, Setting], source: str
) -> None:
    problems = Problems()
    for key, value in _leaves(
        cast(dict[str, Any], OmegaConf.to_container(part)), known_settings, source
    ):
        with problems.collecting():
            _check_key_and_type(key, value, known_settings, source)
            expanded = (
                value
                if known_settings[key].type == Options
                else with_user_paths(value, f"{source}{key}")
            )
            if expanded != value:
                OmegaConf.update(part, key, expanded, merge=False)
    problems.raise_all()


def _check_key_and_type(
    key: str, value: Any, known: Mapping[str, Setting], source: str
) -> None:
    if key not in known:
        raise ConfigError(f"{source}{key} is not a setting; {suggestion(key, list(known))}")
    within = isinstance(value, (list, dict)) or (
        _holds_several(known[key]) and get_origin(known[key].type) is not list
    )
    if within and "${" in str(value):  # a whole list may follow another setting
        raise _no_reference(source + key)
    if value == MISSING and not known[key].required:  # OmegaConf would drop it silently
        raise _not_set(f"{source}{key}")
    # OmegaConf checks the type of ${...} after merging.
    deferred = isinstance(value, str) and (value == MISSING or "${" in value)
    if not deferred and not is_of_type(value, known[key].type):
        raise ConfigError(
            f"{source}{key} must be {TYPE_NAMES[known[key].type]}, not {show_value(value)}."
        )


def _leaves(
    content: Mapping[str, Any],
    known_settings: Mapping[str, Setting],
    source: str,
    prefix: str = "",
) -> Iterator[tuple[str, Any]]:
    """Yield (full key, value) of every setting. Raises ConfigError for a section given as a single value."""
    sections = _sections(tuple(known_settings))
    for name, value in content.items():
        key = f"{prefix}{name}"
        if "." in str(name):
            raise ConfigError(
                f"{source}{key}: in YAML a dot does not nest. Write `{key.replace('.', ': {', 1)}: ...}}`."
            )
        is_section = key in sections
        if is_section and not isinstance(value, dict):
            raise ConfigError(
                f"{source}{key} is a section and takes settings ({key}.NAME), not {show_value(value)}."
            )
        if is_section or (isinstance(value, dict) and key not in known_settings):
            yield from _leaves(value, known_settings, source, f"{key}.")
        else:
            yield key, value


@cache
def _sections(keys: tuple[str, ...]) -> frozenset[str]:
    """Return `policy` and `policy.optimizer` for `policy.optimizer.beta1`."""
    names = [key.split(".") for key in keys]
    return frozenset(
        ".".join(parts[:depth]) for parts in names for depth in range(1, len(parts))
    )


def _not_set(key: str) -> ConfigError:
    return ConfigError(
        f"{key}: ??? stands for a value that is not set. Leave the key out instead."
    )


def _holds_several(setting: Setting) -> bool:
    return setting.type not in (bool, int, float, str, Count)


def _no_reference(key: str) -> ConfigError:
    return ConfigError(
        f"{key}: ${{...}} is not read in lists and mappings. Give the values themselves."
    )


def _to_object(merged: Any, known_settings: Mapping[str, Setting]) -> Any:
    try:
        # `missing_keys` resolves every setting, 8 ms.
        required = [key for key, setting in known_settings.items() if setting.required]
        unset = [
            key for key in required if OmegaConf.select(merged, key, default=None) is None
        ]
        if unset:
            verb = "is" if len(unset) == 1 else "are"
            raise ConfigError(
                f"{', '.join(unset)} {verb} not set. Set it in the file or as {unset[0]}=VALUE."
            )
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise _refusal(
            error, "" if error.full_key else _wrong_list(merged, known_settings)
        ) from None


def _wrong_list(merged: Any, known_settings: Mapping[str, Setting]) -> str:
    """Find the list setting whose ${...} is not a list. OmegaConf's error about it names no key."""
    for key, setting in known_settings.items():
        try:
            if get_origin(setting.type) is list:
                OmegaConf.select(merged, key)
        except OmegaConfBaseException:
            return key
    return "a list"


def _check_ranges(config: Any, known_settings: Mapping[str, Setting]) -> None:
    problems = []
    for key, setting in known_settings.items():
        value = value_of(config, key)
        if not setting.allows(value):
            limit = setting.range
            if (
                setting.maximum is None
                and not setting.choices
                and (not setting.range or value > setting.highest)
            ):
                limit = f"at most {setting.highest:,}{'' if setting.range else ' in size'}"
            problems.append(ConfigError(f"{key} must be {limit}, not {show_value(value)}."))
    raise_all(problems)
