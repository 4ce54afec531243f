"""Make sure that `import controller` finds the package next to this one."""

from importlib.util import find_spec
from pathlib import Path

OURS = Path(__file__).resolve().parents[1] / "controller"


def check_controller() -> None:
    """Raise ImportError if a user's file or folder hides `controller`, which checks the other packages."""
    spec = find_spec("controller")
    places = (
        [] if spec is None else [*(spec.submodule_search_locations or [str(spec.origin)])]
    )
    for place in places:
        resolved = Path(place).resolve()
        if OURS not in (resolved, resolved.parent):  # `controller/moved` is on its path too
            raise ImportError(
                f"{place} hides Ballast's package controller. Rename it, or run from another folder"
            )
