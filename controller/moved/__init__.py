"""Answer `python -m controller.NAME` of commands that are now `ballast NAME`, for one version more.

`controller.__path__` ends with this folder, so that its modules are found under their earlier names.
"""

import importlib
import sys
from typing import NoReturn


def run_moved(earlier: str, name: str) -> NoReturn:
    """Say the command's new name, run it with this process's arguments, and exit with its code."""
    print(
        f"python -m controller.{earlier} is now `ballast {name}` (python -m ballast {name}).",
        file=sys.stderr,
    )
    # By name: nothing in controller imports ballast.
    sys.exit(importlib.import_module("ballast.commands").main([name, *sys.argv[1:]]))
