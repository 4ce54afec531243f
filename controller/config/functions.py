"""Find the functions that settings name, `module:function` or `path/file.py:function`, without running their
source.

reward.function --check_function--> in its file --find_function--> packed, signature
                                                                   --requested_columns--> columns
"""

import ast
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from symtable import SymbolTable, symtable
from typing import Any

from workers.batch.score import RAW
from workers.errors import ConfigError, clause
from workers.user_code.functions import Signature
from workers.user_code.verl_form import SOLUTION, TRUTH, is_verl_form, sources_of

GIVEN = "callable:"  # prefix of the name, in settings, of a function given to a call
RESPONSES = {"response", "responses"}
OF_SAMPLES = (
    *(
        "algorithm.advantage_function",
        "algorithm.group_filter",
        "reward.shaping",
        "run.metrics",
    ),
    "batch.replay.by",
)
"""Settings of functions that take columns of samples, see `controller.data.sample_functions`."""


def check_function(key: str, name: str) -> None:
    """Find a function without importing it. `key` names the setting.

    Raises ConfigError if the name is malformed, the file is missing or does not compile, or lacks the
    function.
    """
    if name.startswith(GIVEN):
        raise ConfigError(
            f"{key}={name} stands for a Python function that was given to a call. Give it again, as in "
            "ballast.fit(..., reward=...), or name a function here."
        )
    match = re.fullmatch(r"(.+\.py|[A-Za-z_]\w*(?:\.\w+)*):([A-Za-z_]\w*)", name)
    if match is None:
        raise ConfigError(
            f"{key}={name!r} must be module:function or path/file.py:function."
        )
    function = match.group(2)
    path, names = check_source(key, name)
    symbol = names.lookup(function) if function in names.get_identifiers() else None
    if symbol is None or not (symbol.is_assigned() or symbol.is_imported()):
        raise ConfigError(f"{key}={name!r}: {path} defines no {function}.")


def check_reward_function(key: str, name: str) -> None:
    """Find a reward function, and check its parameters as written. Raises ConfigError as `check_function`.

    A decorator may change them. Then they are checked when the function is imported.
    """
    check_function(key, name)
    path, _ = check_source(key, name)
    function = name.rpartition(":")[2]
    for statement in ast.parse(path.read_bytes()).body:
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if statement.name == function and not statement.decorator_list:
            check_reward_parameters(_written_signature(statement.args), key, name)


def _written_signature(arguments: ast.arguments) -> Signature:
    by_place = arguments.posonlyargs + arguments.args
    with_default = by_place[len(by_place) - len(arguments.defaults) :]
    with_default += [
        name
        for name, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if value
    ]
    named = arguments.args + arguments.kwonlyargs
    required = tuple(argument.arg for argument in named if argument not in with_default)
    return Signature(
        tuple(argument.arg for argument in named), required, arguments.kwarg is not None
    )


def absolute(name: str) -> str:
    """Return a function's name with the whole path of its file, because workers have their own folders."""
    place, _, function = name.rpartition(":")
    return f"{Path(place).resolve()}:{function}" if place.endswith(".py") else name


def check_command(key: str, command: str) -> None:
    """Raise ConfigError for a command line that cannot be split, or whose program does not exist here."""
    try:
        program = shlex.split(command)[0]
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"{key}={command!r}: not a command line ({clause(error)}). Write it as in a shell."
        ) from None
    if shutil.which(program) is None:
        raise ConfigError(
            f"{key}={command!r}: there is no program {program}. Install it, or give its path."
        )


def check_source(key: str, name: str) -> tuple[Path, SymbolTable]:
    """Return the file of a setting, `module` or `path/file.py`, perhaps with `:function`, and its names.

    Raises ConfigError if it is missing or does not compile.
    """
    path = source_file(name)
    place = name.partition(":")[0]
    if path is None or not path.is_file():
        source = (
            f"file {place}"
            if place.endswith(".py")
            else f"module {place} in the working directory or installed"
        )
        raise ConfigError(f"{key}={name!r}: there is no {source}.")
    try:
        return path, symtable(path.read_text(encoding="utf-8"), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{key}={name!r}: {path} is not valid Python: {error}.") from None


def source_file(name: str) -> Path | None:
    """Return the file that a function's or a module's name refers to, or None if the module is not found."""
    place = name.partition(":")[0]
    return Path(place) if place.endswith(".py") else _module_file(place)


def _module_file(name: str) -> Path | None:
    """Find a module's source as `import` does, without running its packages."""
    path, parts = [str(Path.cwd()), *sys.path], name.split(".")
    for count in range(1, len(parts) + 1):
        spec = _spec(parts[:count], path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec and spec.origin else None


def _spec(parts: list[str], path: list[str]) -> ModuleSpec | None:
    """Ask each finder in turn, because editable installations add theirs."""
    for finder in sys.meta_path:
        # PathFinder by the last name alone: of a dotted one, a namespace package would need its parent in
        # sys.modules.
        spec = finder.find_spec(
            parts[-1] if finder is PathFinder else ".".join(parts), path
        )
        if spec is not None:
            return spec
    return None


def requested_columns(
    signature: Signature,
    record: Mapping[str, Any],
    name: str,
    *,
    key: str = "reward.function",
) -> tuple[str, ...]:
    """Return the record columns, and `response_raw`, that the function takes besides `response` or
    `responses`.

    A function with `solution_str` takes verl's arguments. key: its setting. Raises ConfigError if it takes
    none of these, or requires a column that the data lack.
    """
    names = set(signature.names)
    check_reward_parameters(signature, key, name)
    if is_verl_form(names):
        return _verl_columns(signature, record, f"{key}={name!r}")
    offered = set(record)
    columns = requested_names(key, name, signature, offered | RESPONSES | {RAW})
    return tuple(
        column
        for column in columns
        if column not in RESPONSES and (column in offered or column in names)
    )


def check_reward_parameters(signature: Signature, key: str, name: str) -> None:
    """Raise ConfigError unless a function takes responses. The record's columns are checked by
    `requested_columns`.
    """
    names = set(signature.names)
    if "completions" in signature.required:
        raise ConfigError(
            f"{key}={name!r} takes 'completions', as rewards of TRL do. Here it takes 'responses', the "
            "texts of all samples, or 'response', a single text, and returns a number for each (see "
            "docs/migration.md)."
        )
    if "solution_strs" in signature.required:
        raise ConfigError(
            f"{key}={name!r} takes 'solution_strs', as verl's batch manager gives. Here it takes "
            "'solution_str' with verl's other arguments, or 'responses', the texts of all samples, with "
            "lists of columns."
        )
    takes_responses = (
        len(names & RESPONSES) == 1 or signature.takes_all or is_verl_form(names)
    )
    if not takes_responses:
        raise ConfigError(
            f"{key}={name!r} must take a parameter 'response', or 'responses' for many at once."
        )


def _verl_columns(
    signature: Signature, record: Mapping[str, Any], setting: str
) -> tuple[str, ...]:
    sources = sources_of(signature.names, record)
    if lacking := sorted(
        set(signature.required) - sources.keys() - {SOLUTION, "extra_info"}
    ):
        raise ConfigError(
            f"{setting}: it takes verl's arguments, but the first record has nothing for "
            f"{', '.join(lacking)}. Add the columns ({TRUTH} counts as ground_truth), or write `def "
            "reward(response, ...)` with columns of the data."
        )
    return tuple(sorted(set(sources.values())))


def requested_names(
    key: str, name: str, signature: Signature, offered: Iterable[str]
) -> tuple[str, ...]:
    """Return those of the `offered` arguments that a function takes. Raises ConfigError if it requires
    others.
    """
    offered = set(offered)
    if lacking := sorted(set(signature.required) - offered):
        raise ConfigError(
            f"{key}={name!r} asks for {lacking}, but the data has {sorted(offered)}."
        )
    return tuple(sorted(offered if signature.takes_all else offered & set(signature.names)))
