"""Find users' functions and classes: imported, described and pickled in another process, never in ours.

    find_function(key, "module:function" or "path/file.py:function") --process--> import, pickle
        --> UserFunction(packed, signature), which only the processes that run it unpickle
    IsolatedFunction(arguments) --process, kept--> unpickle once, call --JSON--> value

An import that raises, hangs, exits, reads the command line or kills its process is a ConfigError.
"""

import base64
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import cloudpickle

from workers.errors import ConfigError, DataError, describe_error, quote
from workers.user_code.process import LONGEST_PICKLE, NoAnswerError, UserProcess, ask

TIMEOUT_SETTING = "resources.user_code_timeout_s"
AS_A_PROGRAM = 'Keep code for use as a program behind `if __name__ == "__main__":`'


@dataclass(frozen=True)
class Signature:
    """names: of parameters that can be given by name. required: those without a default.
    takes_all: has `**`.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_all: bool


@dataclass(frozen=True)
class UserFunction:
    packed: bytes  # by value, so that other nodes need no copy of its file
    signature: Signature
    # Without a file: changes with the code, whereas pickles may differ between runs.
    version: str = ""


def find_function(key: str, name: str, *, timeout_s: float) -> UserFunction:
    """Return the function `module:function` or `path/file.py:function` of a setting. Raises ConfigError."""
    description = _import_function(
        "workers.user_code.functions:describe", key, name, timeout_s
    )
    signature = Signature(
        tuple(description["names"]),
        tuple(description["required"]),
        description["takes_all"],
    )
    return UserFunction(base64.b64decode(description["packed"]), signature)


def find_class(key: str, name: str, methods: tuple[str, ...], *, timeout_s: float) -> bytes:
    """Return the class of a setting, packed. Raises ConfigError, also if a method is missing."""
    description = _import_function(
        "workers.user_code.functions:describe", key, name, timeout_s
    )
    if not description["is_class"] or not set(methods) <= set(description["methods"]):
        raise ConfigError(
            f"{key}={name!r} must be a class with the methods {' and '.join(methods)}."
        )
    return base64.b64decode(description["packed"])


@dataclass(frozen=True)
class Tools:
    """packed: the functions by name. schemas: as chat templates take them."""

    packed: bytes
    schemas: list[dict[str, Any]]


def find_tools(key: str, name: str, *, timeout_s: float) -> Tools:
    """Return the functions of the module or file of a setting. Raises ConfigError, also for one without a
    schema.
    """
    description = _import_function("workers.trials:describe_tools", key, name, timeout_s)
    return Tools(base64.b64decode(description["packed"]), description["schemas"])


def check_loss(key: str, name: str, *trial: Any, timeout_s: float) -> None:
    """Raise ConfigError if workers could not use the policy loss of a setting. See
    `workers.trials.try_loss`.
    """
    _import_function("workers.trials:try_loss", key, name, timeout_s, *trial)


def check_optimizer(key: str, name: str, *trial: Any, timeout_s: float) -> None:
    """Raise ConfigError if workers could not use the optimiser or schedule. See
    `workers.trials.try_optimizer`.
    """
    _import_function("workers.trials:try_optimizer", key, name, timeout_s, *trial)


class IsolatedFunction:
    """Call a user's function in its own process, started at the first call and kept until `close`."""

    def __init__(
        self, key: str, function: UserFunction, timeout_s: float, **bound: Any
    ) -> None:
        """key: begins errors. bound: arguments by name of every call, sent once."""
        self.key = key
        self.signature = function.signature
        self._packed, self._timeout_s, self._bound = (
            function.packed,
            timeout_s,
            self._select_arguments(bound),
        )
        self._process: UserProcess | None = None

    def _select_arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return {
            k: v
            for k, v in named.items()
            if self.signature.takes_all or k in self.signature.names
        }

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return its value, through JSON: arrays and tensors become lists. Raises ConfigError.

        named: arguments by name. Those that the function does not take are left out.
        """
        try:
            if self._process is None:
                runner = "workers.user_code.functions:Runner"
                self._process = UserProcess(runner, self.key, self._packed, self._bound)
                weakref.finalize(self, self._process.end)
                self._process.receive(self._timeout_s, TIMEOUT_SETTING)
            self._process.send((arguments, self._select_arguments(named)))
            return self._process.receive(
                self._timeout_s, TIMEOUT_SETTING, longest=LONGEST_PICKLE
            )
        except NoAnswerError as error:
            self.close()
            raise ConfigError(f"{self.key} {error}.") from None

    def close(self) -> None:
        """End the process. Another call starts a new one."""
        process = self._process
        self._process = None
        if process is not None:
            process.end()


def signature_of(function: Callable[..., Any]) -> Signature:
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = tuple(p.name for p in named if p.default is p.empty)
    return Signature(
        tuple(p.name for p in named),
        required,
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _import_function(
    function: str, key: str, name: str, timeout_s: float, *trial: Any
) -> Any:
    try:
        return ask(
            function, key, name, *trial, timeout_s=timeout_s, setting=TIMEOUT_SETTING
        )
    except NoAnswerError as error:
        raise ConfigError(f"{key}={name!r}: its import {error}. {AS_A_PROGRAM}.") from None


def pickle_function(target: Any, *modules: ModuleType | None) -> bytes:
    users = {module for module in modules if module is not None and _is_users(module)}
    for module in users:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cast(bytes, cloudpickle.dumps(target))
    finally:
        for module in users:
            cloudpickle.unregister_pickle_by_value(module)


def _is_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None) or "site-packages"
    return "site-packages" not in file and not file.startswith(sysconfig.get_path("stdlib"))


# The functions below run in the process.


def describe(key: str, name: str) -> dict[str, Any]:
    """Describe `name` in the process: signature, methods, and its base-64 pickle `packed`."""
    module, target = load(key, name)
    packed = pack_text(key, name, module, target)
    methods = [method for method in dir(target) if callable(getattr(target, method, None))]
    try:
        signature = asdict(signature_of(target))
    except (TypeError, ValueError):
        raise ConfigError(
            f"{key}={name!r} has no signature that can be read. Name a Python function."
        ) from None
    return signature | {
        "is_class": isinstance(target, type),
        "methods": methods,
        "packed": packed,
    }


def pack_text(key: str, name: str, module: ModuleType, target: Any) -> str:
    """Pickle what was found in `module`, in base 64. Raises ConfigError."""
    try:
        packed = pickle_function(
            target, module, sys.modules.get(getattr(target, "__module__", ""))
        )
    except Exception as error:
        held = ", ".join(_not_picklable(module)) or "something"
        raise ConfigError(
            f"{key}={name!r} cannot be sent to other processes, because {held} cannot be pickled "
            f"({describe_error(error)}). Make it inside the function, at its first call."
        ) from None
    return base64.b64encode(packed).decode()


class Runner:
    def __init__(self, key: str, packed: bytes, bound: dict[str, Any]) -> None:
        self._key = key
        self._function = cloudpickle.loads(packed)
        self._bound = bound

    def __call__(
        self, request: tuple[tuple[Any, ...], dict[str, Any]], reply: Callable[[Any], None]
    ) -> None:
        arguments, named = request
        reply(_plain(self._function(*arguments, **self._bound, **named), self._key))


def load(key: str, name: str) -> tuple[ModuleType, Callable[..., Any]]:
    """Return the module and the function `name`. Raises ConfigError if it is missing or raises."""
    place, separator, function_name = name.rpartition(":")
    if not separator:
        raise ConfigError(
            f"{key}={name!r} must be module:function or path/file.py:function."
        )
    module = load_module(key, place)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{key}={name!r}: {place} has no function {function_name!r}.")
    return module, function


def load_module(key: str, place: str) -> ModuleType:
    """Import `module` or `path/file.py`. Raises ConfigError if it is missing or raises."""
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ConfigError(f"{key}: there is no file {place}.")
    try:
        return _import_file(Path(place)) if is_file else _import_module(place)
    except (Exception, KeyboardInterrupt) as error:
        source = place if is_file else f"module {place!r}"
        raise ConfigError(
            f"{key}: {source} cannot be imported: {describe_error(error)}."
        ) from error


def _import_file(path: Path) -> ModuleType:
    module_name = f"ballast_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # its name ends with .py
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _not_picklable(module: ModuleType) -> list[str]:
    code = (ModuleType, type)
    return [
        f"{name} ({type(value).__name__})"
        for name, value in vars(module).items()
        if not name.startswith("__")
        and not isinstance(value, code)
        and not inspect.isroutine(value)
        if not _can_be_pickled(value)
    ]


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _plain(value: Any, key: str) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple, range)):
        return [_plain(item, key) for item in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _plain(item, key) for name, item in value.items()}
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    raise DataError(
        f"{key} returned {quote(value)}: return numbers, texts, and lists or mappings by text of them."
    )
