"""`import controller` finds the package beside this one, or it is told in one line what it would find."""

from importlib.util import find_spec
from pathlib import Path

OURS = Path(__file__).resolve().parents[1] / "controller"


def check_controller() -> None:
    """Raise ImportError if a file or folder of the user's hides `controller`, which looks after the other packages."""
    spec = find_spec("controller")
    places = [] if spec is None else [*(spec.submodule_search_locations or [str(spec.origin)])]
    for place in places:
        if Path(place).resolve() != OURS:
            raise ImportError(f"{place} hides Ballast's package controller; rename it, or run from another folder")
