"""Users' functions and classes are imported, described and pickled in a process of their own, never in ours.

    find_function(key, "module:function" or "path/file.py:function") --process--> import, signature, cloudpickle
        --> UserFunction(packed, signature), which only the processes that run it unpickle
    call(packed, arguments) --process--> unpickle, call --JSON--> value

An import that raises, hangs, exits, reads the command line or kills its process is a ConfigError in one sentence.
"""

import base64
import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

import cloudpickle

from workers.errors import ConfigError
from workers.isolation.asking import NoAnswerError, ask
from workers.isolation.process import RAISED, named

TIMEOUT_SETTING = "resources.user_code_timeout_s"
AS_A_PROGRAM = 'keep what only a program does behind `if __name__ == "__main__":`'


@dataclass(frozen=True)
class Signature:
    """names: parameters that can be given by name, in order. required: those without a default. takes_all: whether
    there is a `**` parameter."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_all: bool


@dataclass(frozen=True)
class UserFunction:
    """packed: the function, pickled by value, so that other nodes and processes need no copy of its file. version: of a
    function that is in no file, a text that changes with its code; a pickle may differ from time to time."""

    packed: bytes
    signature: Signature
    version: str = ""


def find_function(key: str, name: str, *, timeout_s: float) -> UserFunction:
    """The function that `module:function` or `path/file.py:function`, the value of setting `key`, names.

    timeout_s: seconds that its import may take. Raises ConfigError with what was wrong.
    """
    found = _imported("workers.user_code:describe", key, name, timeout_s)
    signature = Signature(tuple(found["names"]), tuple(found["required"]), found["takes_all"])
    return UserFunction(base64.b64decode(found["packed"]), signature)


def given_function(name: str, function: Callable[..., Any]) -> UserFunction:
    """A function of this process, such as a notebook's, a closure or a lambda, pickled by value with its module.

    name: what stands for it in settings. Raises ConfigError if it has no signature, or cannot be pickled.
    """
    try:
        signature = signature_of(function)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} has no signature that can be read; give a Python function.") from None
    try:
        with _pickled_by_value(function):
            return UserFunction(cloudpickle.dumps(function), signature, _version(function))
    except Exception as error:  # whatever the objects that it holds raise
        raise ConfigError(
            f"{name} cannot be sent to other processes ({named(error)}); make what cannot be pickled inside the "
            "function, at its first call."
        ) from None


@contextmanager
def _pickled_by_value(function: Any) -> Iterator[None]:
    """Inside, what the user's module of this function defines needs no copy of its file elsewhere."""
    while isinstance(function, partial):
        function = function.func
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or not _is_users(module):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _version(function: Any) -> str:
    """Of its code, and of the numbers and texts that it is closed over or begins with."""
    held: list[Any] = []
    while isinstance(function, partial):
        held += [*function.args, *function.keywords.items()]
        function = function.func
    if not hasattr(function, "__code__"):
        held += sorted(getattr(function, "__dict__", {}).items())
        function = type(function).__call__
    function = getattr(function, "__func__", function)
    held += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    held += [*(getattr(function, "__defaults__", None) or ()), _code_of(getattr(function, "__code__", None))]
    return hashlib.sha256(repr([_told(value) for value in held]).encode()).hexdigest()


def _code_of(code: Any) -> Any:
    """Its instructions, names and constants, without the place where it was written."""
    if not isinstance(code, CodeType):
        return _told(code)
    return code.co_code, code.co_names, [_code_of(constant) for constant in code.co_consts]


def _told(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_told(part) for part in value]
    return value if isinstance(value, (bool, int, float, str, bytes, type(None))) else type(value).__name__


def _is_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None) or "site-packages"
    return "site-packages" not in file and not file.startswith(sysconfig.get_path("stdlib"))


def find_class(key: str, name: str, methods: tuple[str, ...], *, timeout_s: float) -> bytes:
    """The class that setting `key` names, pickled by value. Raises ConfigError, also if it lacks one of `methods`."""
    found = _imported("workers.user_code:describe", key, name, timeout_s)
    if not found["is_class"] or not set(methods) <= set(found["methods"]):
        raise ConfigError(f"{key}={name!r} must be a class with the methods {' and '.join(methods)}.")
    return base64.b64decode(found["packed"])


def check_loss(key: str, name: str, *trial: Any, timeout_s: float) -> None:
    """Raise ConfigError if the workers could not take the policy loss `module:function` that setting `key` names.

    trial: see `workers.isolation.trials.try_loss`.
    """
    _imported("workers.isolation.trials:try_loss", key, name, timeout_s, *trial)


def call(packed: bytes, *arguments: Any, key: str, timeout_s: float) -> Any:
    """The value of a packed function, as JSON gives it back; NumPy arrays and tensors are lists.

    Raises ConfigError if it raises, ends its process, or takes more than `timeout_s` seconds.
    """
    run = "workers.user_code:run"
    try:
        return ask(run, packed, arguments, key, timeout_s=timeout_s, setting=TIMEOUT_SETTING)
    except NoAnswerError as error:
        raise ConfigError(f"{key} {error}.") from None


def signature_of(function: Callable[..., Any]) -> Signature:
    """A function's parameters, as a call by name sees them."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = tuple(p.name for p in named if p.default is p.empty)
    return Signature(tuple(p.name for p in named), required, any(p.kind is p.VAR_KEYWORD for p in parameters))


def _imported(function: str, key: str, name: str, timeout_s: float, *trial: Any) -> Any:
    try:
        return ask(function, key, name, *trial, timeout_s=timeout_s, setting=TIMEOUT_SETTING)
    except NoAnswerError as error:
        raise ConfigError(f"{key}={name!r}: its import {error}; {AS_A_PROGRAM}.") from None


# The functions below run in the process.


def describe(key: str, name: str) -> dict[str, Any]:
    """The function or class that `name` names: its signature, methods and `packed`, its pickle in base 64."""
    module, found = load(key, name)
    packed = base64.b64encode(_packed(f"{key}={name!r}", module, found)).decode()
    methods = [method for method in dir(found) if callable(getattr(found, method, None))]
    try:
        signature = asdict(signature_of(found))
    except (TypeError, ValueError):
        raise ConfigError(f"{key}={name!r} has no signature that can be read; name a Python function.") from None
    return signature | {"is_class": isinstance(found, type), "methods": methods, "packed": packed}


def run(packed: bytes, arguments: tuple[Any, ...], key: str) -> Any:
    """The value of a packed function, in a form for JSON. Raises ConfigError, naming setting `key`, if it raises."""
    try:
        return _plain(cloudpickle.loads(packed)(*arguments))
    except RAISED as error:
        raise ConfigError(f"{key} raised {named(error)}.") from None


def load(key: str, name: str) -> tuple[ModuleType, Callable[..., Any]]:
    """The module and the function that `name` names. Raises ConfigError naming what is missing, or what it raised."""
    place, separator, function_name = name.rpartition(":")
    if not separator:
        raise ConfigError(f"{key}={name!r} must be module:function or path/file.py:function.")
    module = _load_file(key, Path(place)) if place.endswith(".py") else _load_module(key, place)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{key}={name!r}: {place} has no function {function_name!r}.")
    return module, function


def _load_file(key: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path}.")
    module_name = f"ballast_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, KeyboardInterrupt) as error:
        raise ConfigError(f"{key}: {path} cannot be imported: {named(error)}.") from error
    return module


def _load_module(key: str, name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, KeyboardInterrupt) as error:
        raise ConfigError(f"{key}: module {name!r} cannot be imported: {named(error)}.") from error


def _packed(which: str, module: ModuleType, found: Any) -> bytes:
    for each in {module.__name__: module, found.__module__: sys.modules[found.__module__]}.values():
        if "site-packages" not in (getattr(each, "__file__", None) or "site-packages"):
            cloudpickle.register_pickle_by_value(each)
    try:
        return cast(bytes, cloudpickle.dumps(found))
    except Exception as error:
        held = ", ".join(_not_picklable(module)) or "something"
        raise ConfigError(
            f"{which} cannot be sent to other processes, because {held} cannot be pickled ({named(error)}); make "
            "it inside the function, at its first call."
        ) from None


def _not_picklable(module: ModuleType) -> list[str]:
    """Names of values in the module that cannot be pickled, such as a thread pool or an open file."""
    code = (ModuleType, type)
    return [
        f"{name} ({type(value).__name__})"
        for name, value in vars(module).items()
        if not name.startswith("__") and not isinstance(value, code) and not inspect.isroutine(value)
        if not _can_be_pickled(value)
    ]


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _plain(value: Any) -> Any:
    """`value` for JSON; a value that JSON cannot hold becomes its repr, which no caller takes for a number."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple, range)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)
