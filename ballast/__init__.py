"""Ballast under one name: commands for a shell, functions for a notebook, a script or a sweep, and tools.

    python -m ballast fit --config mine.yaml         commands: every command by its short name
    ballast.fit("mine.yaml", reward=mine).summary    training, functions.py of tools: commands as functions
    doctor/ serve/ replay/ migrate/ planning/ ...    tools, which nothing below imports

It loads `controller` at the first call, so that `import ballast` is instant.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ballast.loop.functions import open
    from ballast.sampling_commands.functions import Evaluation, evaluate, generate
    from ballast.training import Result, fit, preferences, reward_model, sft
    from controller.training_loop import RunView, StopTraining

__version__ = "0.3.0"
__all__ = [
    "Evaluation",
    "Result",
    "RunView",
    "StopTraining",
    "evaluate",
    "fit",
    "generate",
    "open",
    "preferences",
    "reward_model",
    "sft",
]

_PLACES = {
    **dict.fromkeys(
        ("Result", "fit", "preferences", "reward_model", "sft"), "ballast.training"
    ),
    **dict.fromkeys(
        ("Evaluation", "evaluate", "generate"), "ballast.sampling_commands.functions"
    ),
    "open": "ballast.loop.functions",
    **dict.fromkeys(("RunView", "StopTraining"), "controller.training_loop"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'ballast' has no attribute {name!r}")
    from ballast.packages import check_controller

    check_controller()
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
