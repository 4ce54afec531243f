"""Checks config.json against the model types that transformers knows, without importing transformers.

    config.json --model_type, architectures--> names in transformers' source --> nothing, or why it is not trained

The names are read from the source of what is installed, because importing it takes seconds.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workers.errors import ConfigError

CAUSAL, VALUE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
CONFIGURATIONS = "CONFIG_MAPPING_NAMES"


def check_model_type(description: Mapping[str, Any], key: str, path: str, *kinds: str) -> None:
    """Raise ConfigError unless config.json describes a model that transformers builds itself, of one of `kinds`.

    kinds: CAUSAL, VALUE, or both. key, path: the setting that names the model, and its value. Where transformers keeps
    its names elsewhere, nothing is refused.
    """
    family, known = description.get("model_type"), _names()
    if not all(known.get(kind) for kind in (CONFIGURATIONS, *kinds)):
        return
    if family not in known[CONFIGURATIONS]:
        raise ConfigError(f"{key}={path}: {_unknown(family, description)}")
    wanted = {name for kind in kinds for name in known[kind].get(family, ())}
    made = [name for name in description.get("architectures") or () if _is_other(name, kinds)]
    if made or not wanted:
        raise ConfigError(
            f"{key}={path} is {' or '.join(made) or f'of type {family}'}, not a causal language model"
            f"{' or a sequence classification' if VALUE in kinds else ''}; take another model."
        )


def _unknown(family: Any, description: Mapping[str, Any]) -> str:
    if "auto_map" in description:
        return (
            f"a model of type {family} needs code from its own folder (auto_map in config.json), which is never run; "
            "take a model that transformers knows."
        )
    if family is None:
        return "config.json names no model_type; put the config.json of these weights beside them."
    return f"the installed transformers knows no model of type {family}; take another model, or a newer transformers."


def _is_other(architecture: str, kinds: tuple[str, ...]) -> bool:
    """Whether transformers has this class, for another use than `kinds`."""
    uses = {use for use, classes in _names().items() if any(architecture in found for found in classes.values())}
    return bool(uses) and not uses & set(kinds)


@functools.cache
def _names() -> dict[str, dict[str, tuple[str, ...]]]:
    """Names of classes by model type, of every table NAMES = OrderedDict([(type, class), ...]) of the auto classes."""
    package = importlib.util.find_spec("transformers")
    if package is None or not package.submodule_search_locations:
        return {}
    folder = Path(package.submodule_search_locations[0], "models", "auto")
    sources = [folder / f"{name}.py" for name in ("auto_mappings", "configuration_auto", "modeling_auto")]
    names: dict[str, dict[str, tuple[str, ...]]] = {}
    for source in sources:
        for statement in ast.parse(source.read_text(encoding="utf-8")).body if source.is_file() else ():
            for table, entries in _tables(statement):
                names.setdefault(table, {}).update(entries)
    return names


def _tables(statement: ast.stmt) -> Iterator[tuple[str, dict[str, tuple[str, ...]]]]:
    """(name, entries) of `NAME = OrderedDict([...])`, `NAME = OrderedDict(**{...})` and `NAME.update({...})`."""
    call = getattr(statement, "value", None)
    if not isinstance(call, ast.Call):
        return
    target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(call.func, "value", None)
    if isinstance(target, ast.Name) and target.id.endswith("MAPPING_NAMES"):
        yield target.id, dict(_entries(call))


def _entries(call: ast.Call) -> Iterator[tuple[str, tuple[str, ...]]]:
    for given in (*call.args, *(keyword.value for keyword in call.keywords)):
        for name, classes in _pairs(given):
            yield str(ast.literal_eval(name)), _texts(classes)


def _pairs(table: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """(key, value) of a list of pairs, or of a mapping without the entries that it unpacks from another (`**`)."""
    if isinstance(table, ast.List):
        return [(entry.elts[0], entry.elts[1]) for entry in table.elts if isinstance(entry, ast.Tuple)]
    if isinstance(table, ast.Dict):
        return [(key, value) for key, value in zip(table.keys, table.values, strict=True) if key is not None]
    return []


def _texts(classes: ast.expr) -> tuple[str, ...]:
    """The names in an expression: one class, or a tuple of several."""
    constants = (part.value for part in ast.walk(classes) if isinstance(part, ast.Constant))
    return tuple(value for value in constants if isinstance(value, str))
