"""Families that compute states in float32, whatever the model's dtype: their modules' code, in float64."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

SINGLE = {
    "torch.float32": "torch.float64",
    ".float()": ".double()",
    "dtype=torch.float,": "dtype=torch.float64,",
}


def compute_states_in_float64(model: nn.Module) -> None:
    """Let a model and its family's module compute in float64 what transformers computes in float32, for the
    rest of the process.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        if ".models." in name:
            _rewrite(sys.modules[name])


def _rewrite(module: ModuleType) -> None:
    source = Path(str(module.__file__)).read_text()
    for single, double in SINGLE.items():
        source = source.replace(single, double)
    other = ModuleType(module.__name__)
    other.__dict__.update(__package__=module.__package__, __file__=module.__file__)
    exec(compile(source, str(module.__file__), "exec"), other.__dict__)
    rewritten = dict(_functions(other))
    for name, function in _functions(module):
        if name in rewritten:
            function.__code__ = rewritten[name].__code__


def _functions(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    for name, value in vars(module).items():
        members = vars(value).items() if isinstance(value, type) else [("", value)]
        for member, decorated in members:
            function = _without_decorators(decorated)
            if (
                isinstance(function, FunctionType)
                and function.__module__ == module.__name__
            ):
                yield f"{name}.{member}", function


def _without_decorators(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function
