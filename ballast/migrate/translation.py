"""Translate another system's keys and values into settings, and list the differences.

keys --rows of the table--> settings --derived--> settings --checks of a configuration--> Migration
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import yaml
from omegaconf import OmegaConf

from ballast.migrate.commands import FIT, SFT, Command, Recognition, recognise_offline
from ballast.migrate.offline import (
    TABLES,
    defaults,
    derive_offline,
    is_derived,
    rename_keys,
)
from ballast.migrate.reading import parse_value
from ballast.migrate.recognition import matches, recognise_system
from ballast.migrate.rules import PLACES_OF_EPISODES, Settings
from ballast.migrate.systems import derive, keys_of, prepare
from controller.config import Config, load_as
from controller.config.aliases import Counterpart, counterparts
from controller.config.file import Setting
from controller.config.offline import OfflineConfig
from controller.config.value_types import Options, is_of_type
from controller.preflight.checks import check_settings
from controller.preflight.offline_checks import check_offline_settings
from workers.errors import ConfigError

KNOWN = FIT.known
ROWS = [
    row for row in counterparts() if row.is_of(KNOWN) and row.system not in TABLES.values()
]
OPTIONS = {key for key, setting in KNOWN.items() if setting.type == Options}
INSTEAD = {
    "data.train": ("data.sources",),
    "reward.function": ("rollout.environment", "reward.functions", "reward.model.path"),
}
PLACEHOLDERS = {
    "model.path": "models/policy",
    "data.train": "data/train.jsonl",
    "reward.function": "reward.py:reward",
}

NAMED_SECTIONS = ("env.", "select.", "distillation.")
"""Sections whose keys hold names of the user."""
PLAYERS = ("rollout.tools", "rollout.environment", "rollout.agent", "rollout.agent_command")
"""Settings of who plays a sample's turns."""
OF_PLAYERS = (
    "rollout.max_turns",
    "rollout.max_episode_tokens",
    "rollout.max_tool_characters",
)
"""Settings that have no effect without one of them."""


@dataclass
class Migration:
    """evidence: the keys or names that tell the system. settings: by key.

    open: for the user to decide. differs: done differently here. computed: settings that no key of theirs
    holds as they are, with the formula.

    defaults: settings that keep the other system's default, with the reason. without: keys without a
    counterpart.
    unknown: keys in no row. inherited: keys whose values are the system's own defaults, from a parent.
    """

    system: str
    command: Command = FIT
    evidence: str = ""
    settings: Settings = field(default_factory=Settings)
    computed: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    defaults: dict[str, str] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    inherited: frozenset[str] = frozenset()

    @property
    def yaml(self) -> str:
        """Return a file for --config, with the lists as its first comments."""
        lists = {
            "to decide": self.open,
            "computed from several values, not copied": self.computed,
            f"defaults of {self.system} that differ from the ones here, kept": [
                f"{key}: {why}" for key, why in self.defaults.items()
            ],
            "done in another way here": self.differs,
            "without a counterpart, left out": self.without,
            "not known to this version, left out": self.unknown,
        }
        lines = [
            f"# From {self.system}, by `ballast migrate`, for `python -m {self.command.module} --config "
            "FILE`.",
            f"# Recognised by {self.evidence}.",
        ]
        for title, entries in lists.items():
            lines += (
                [f"# {title}:", *(f"#   {entry}" for entry in entries)] if entries else []
            )
        nested = OmegaConf.create()
        for key in filter(self.settings.__contains__, self.command.known):
            OmegaConf.update(nested, key, self.settings[key], force_add=True)
        text = yaml.safe_dump(
            OmegaConf.to_container(nested),
            sort_keys=False,
            default_flow_style=None,
            width=100,
        )
        return "\n".join(lines) + "\n" + text


def migrate(recipe: Mapping[str, Any]) -> Migration:
    """Translate keys and values. Raises ConfigError if they belong to no known system, or nothing is left."""
    offline = recognise_offline(recipe)
    if offline:
        return _migrate_offline(recipe, offline)
    system, evidence = recognise_system(recipe, ROWS)
    migration = Migration(system, evidence=evidence)
    migration.inherited = getattr(recipe, "defaults", frozenset())
    migration.open += getattr(recipe, "notes", ())
    prepared = prepare(system, recipe, migration.open)
    _name_switched_off(recipe, prepared, migration)
    recipe = prepared
    rows = _rows([row for row in ROWS if row.system == system], recipe, migration)
    for theirs, value, row, is_given in rows:
        _apply(migration, row, theirs, value, is_given=is_given)
    row_values = {
        row.key: value
        for _, value, row, _ in rows
        if value is not None and "$" not in str(value)
    }
    named = {key: value for key, value in recipe.items() if key.startswith(NAMED_SECTIONS)}
    defaults = {key: migration.settings[key] for key in migration.defaults}
    copied = dict(migration.settings)
    derive(system, named | row_values, migration.settings, migration.open)
    _follow_derived(migration, defaults)
    if "resources.device" not in migration.settings:
        migration.settings["resources.device"] = "cuda"
        migration.defaults["resources.device"] = (
            "cuda (GPUs there, also where this command has none)"
        )
    for key, placeholder in PLACEHOLDERS.items():
        if not {key, *INSTEAD.get(key, ())} & migration.settings.keys():
            migration.settings[key] = placeholder
            migration.open.append(f"{key}={placeholder}: a placeholder. Name yours.")
    _settle(migration)
    if migration.inherited:
        migration.without.append(
            f"{len(migration.inherited)} keys of a parent, {system}'s own defaults: only those with another "
            "value here are listed, above"
        )
    _list_computed(migration, copied, recipe)
    return migration


def _list_computed(
    migration: Migration, copied: Mapping[str, Any], recipe: Mapping[str, Any]
) -> None:
    """List the settings that are in no key of theirs as they are, with their formulas."""
    theirs = [text_of(value) for value in recipe.values()]
    for key, value in migration.settings.items():
        formula = migration.settings.formulas.get(key)
        is_copy = copied.get(key) == value or text_of(value) in theirs
        is_placeholder = any(
            line.startswith(f"{key}={value}: a placeholder") for line in migration.open
        )
        if formula:
            migration.computed.append(f"{key}={text_of(value)}: {formula}")
        elif not is_copy and not is_placeholder and key != "resources.device":
            migration.computed.append(
                f"{key}={text_of(value)}: no formula, it is what their keys mean together"
            )


def _name_switched_off(
    recipe: Mapping[str, Any], prepared: Mapping[str, Any], migration: Migration
) -> None:
    """List keys that are read by nothing there. A key of another name with the same value has replaced its
    own.
    """
    renamed_values = [value for key, value in prepared.items() if key not in recipe]
    off = [
        key
        for key, value in recipe.items()
        if key not in prepared and value not in renamed_values
    ]
    if off:
        rest = f" and {len(off) - 8} more" if len(off) > 8 else ""
        migration.without.append(
            f"{', '.join(off[:8])}{rest}: other keys switch them off there"
        )


def _follow_derived(migration: Migration, defaults: Mapping[str, Any]) -> None:
    """Tell the value that a default has in our unit, and no default of a setting that is gone."""
    for key, default in defaults.items():
        if key not in migration.settings:
            del migration.defaults[key]
        elif migration.settings[key] != default:
            reason = migration.defaults[key].removeprefix(text_of(default))
            migration.defaults[key] = f"{text_of(migration.settings[key])}{reason}"


def _migrate_offline(recipe: Mapping[str, Any], recognition: Recognition) -> Migration:
    system = recognition.system
    command = recognition.command
    notes = getattr(recipe, "notes", ())
    inherited: frozenset[str] = getattr(recipe, "defaults", frozenset())
    recipe = rename_keys(system, recipe)
    migration = Migration(system, command, recognition.evidence, inherited=inherited)
    migration.open += notes
    tables = (TABLES[system], system)
    of_system = [row for name in tables for row in counterparts() if row.system == name]
    of_system = [
        replace(row, here=(command.size,)) if row.here == (SFT.size,) else row
        for row in of_system
    ]
    table = [row for row in of_system if row.is_of(command.known)]
    rows = _rows([replace(row, default="") for row in table], recipe, migration)
    missing = defaults(system, command, recipe)
    default_rows = _rows(table, missing, Migration(system))
    rows = [
        (key, value, row, False) for key, value, row, is_given in default_rows if is_given
    ] + rows
    for theirs, value, row, is_given in rows:
        if not is_derived(system, theirs) and command.size not in row.here:
            _apply(migration, row, theirs, value, is_given=is_given)
    copied = dict(migration.settings)
    derive_offline(
        system, command, {**missing, **recipe}, migration.settings, migration.open
    )
    for key in ("model.path", "data.train"):
        if not migration.settings.get(key):
            migration.settings[key] = PLACEHOLDERS[key]
            migration.open.append(f"{key}={PLACEHOLDERS[key]}: a placeholder. Name yours.")
    _settle(migration)
    _list_computed(migration, copied, {**missing, **recipe})
    return migration


def _rows(
    of_system: Sequence[Counterpart], recipe: Mapping[str, Any], migration: Migration
) -> list[tuple[str, Any, Counterpart, bool]]:
    """Return (their key, value, row, whether it is given) of keys and defaults, in order of application.

    Defaults first, rows of several settings before rows of one, switches last.
    """
    entries = []
    for theirs, value in recipe.items():
        row = next((row for row in of_system if matches(row, theirs)), None)
        is_inherited = theirs in migration.inherited
        if row:
            entries.append((theirs, value, row, not is_inherited))
        elif not is_inherited:
            migration.unknown.append(f"{theirs}={text_of(value)}")
    named = {row.key for _, _, row, _ in entries}
    entries += [
        (row.key, parse_value(row.default), row, False)
        for row in of_system
        if row.default and row.key not in named
    ]
    return sorted(
        entries,
        key=lambda entry: (
            bool({"true", "false"} & set(entry[2].values)),
            entry[3],
            -len(entry[2].here),
        ),
    )


def text_of(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _apply(
    migration: Migration, row: Counterpart, theirs: str, value: Any, *, is_given: bool
) -> None:
    changes: dict[str, Any] = {}
    assignment = f"{theirs}={text_of(value)}"
    if isinstance(value, str) and "$" in value:
        migration.open.append(
            f"{assignment}: a value that only its own program knows; {row.answer}."
        )
        return
    if row.key in keys_of(row.system):
        return
    ones = value if isinstance(value, list) and row.values else [value]
    in_table = all(text_of(one) in row.values for one in ones)
    for one in ones:
        if text_of(one) in row.values:
            changes |= {
                key: parse_value(ours) for key, ours in row.values[text_of(one)].items()
            }
        elif not row.here:
            if is_given:
                migration.without.append(f"{assignment}: {row.note}")
        elif value is not None:
            changes |= _passed_on(migration, row, assignment, one)
    for key, ours in changes.items():
        if is_given:
            migration.settings[key] = ours
            migration.defaults.pop(key, None)
        elif ours == migration.command.known[key].default:
            migration.settings.pop(key, None)  # a switch that is off by default
            migration.defaults.pop(key, None)
        else:
            migration.settings[key] = ours
            migration.defaults[key] = (
                f"{text_of(ours)} ({assignment} there, {text_of(migration.command.known[key].default)} here)"
            )
    if is_given and changes and row.note and not in_table:
        migration.differs.append(f"{assignment}: {row.answer}")


def _passed_on(
    migration: Migration, row: Counterpart, assignment: str, value: Any
) -> dict[str, Any]:
    # A number that JSON or Python quotes.
    value = parse_value(value) if isinstance(value, str) else value
    if OPTIONS.issuperset(row.here) and not isinstance(value, Mapping):
        (key,), name = (
            row.here,
            assignment.partition("=")[0].rpartition(".")[2].replace("-", "_"),
        )
        return {key: {**migration.settings.get(key, {}), name: value}}
    if row.here == ("model.lora.target_modules",) and isinstance(value, list):
        value = ",".join(map(str, value))
    is_list = isinstance(value, list) and len(value) == len(row.here)
    known_settings = migration.command.known
    takes = partial(_takes, known_settings)
    values = (
        value
        if is_list and not all(map(takes, row.here, [value]))
        else [value] * len(row.here)
    )
    changes = {
        key: one
        for key, one in zip(row.here, values, strict=True)
        if key in known_settings and takes(key, one)
    }
    if len(changes) < len(row.here):
        migration.open.append(
            f"{assignment}: {row.answer}, which does not take this value."
        )
        return {}
    return changes


def _takes(known_settings: Mapping[str, Setting], key: str, value: Any) -> bool:
    return (
        key in known_settings
        and is_of_type(value, known_settings[key].type)
        and known_settings[key].allows(value)
    )


def _check(command: Command, chosen: Mapping[str, Any]) -> None:
    words = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True)}"
        for key, value in chosen.items()
    ]
    config = load_as(command.schema, None, words)
    if isinstance(config, OfflineConfig):
        check_offline_settings(config)
    else:
        check_settings(cast(Config, config))


def _settle(migration: Migration) -> None:
    """Remove and list, one by one, the settings that the checks refuse."""
    chosen = migration.settings
    while True:
        try:
            _check(migration.command, chosen)
            return
        except ConfigError as error:
            prefixes = tuple(
                f"{key}={value!r}"
                for key, value in chosen.items()
                if value in PLACES_OF_EPISODES
            )
            errors = [
                str(one)
                for one in getattr(error, "errors", [error])
                if not str(one).startswith(prefixes)
            ]
            text = " ".join(errors)
            if not text:  # no file of a placeholder, which is listed already
                return
            places = {
                key: text.find(key)
                for key in chosen
                if key in text and key not in PLACEHOLDERS
            }
            if not places:  # a default of ours does not go with them: a file to finish helps more than none
                migration.open.append(text)
                return
            key = min(places, key=lambda key: (places[key], -len(key)))
            value = chosen.pop(key)
            idle = "has no effect" in text
            if migration.defaults.pop(key, ""):
                if not idle:
                    migration.open.append(
                        f"{key}={text_of(value)}: the default there, left out. {text}"
                    )
            else:
                player = _player_to_decide(migration) if key in OF_PLAYERS else ""
                if idle and player:
                    reason = f"add it with {player}, without which it has no effect"
                else:
                    reason = (
                        "no effect in this combination" if idle else f"left out. {text}"
                    )
                lines = migration.without if idle and not player else migration.open
                lines.append(f"{key}={text_of(value)}: {reason}")


def _player_to_decide(migration: Migration) -> str:
    """Return the setting of tools, environment or agent that the user is asked to fill in, or empty."""
    settings = (line.partition(":")[0] for line in migration.open)
    return next((setting for setting in settings if setting in PLAYERS), "")
