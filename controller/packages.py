"""Report a user's file or folder that hides one of our packages, which have common names.

import controller --> would `import workers`, `import balancing` find ours? --> nothing, or ImportError
"""

import functools
import importlib.metadata
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@functools.cache  # reads the files of every installed package, 0.4 s
def distribution() -> str:
    """Return the name under which our packages are installed, or empty for a folder that is on the path
    alone.
    """
    return next(iter(importlib.metadata.packages_distributions().get("balancing", ())), "")


def check_packages(
    names: Iterable[str] = ("workers", "balancing"), root: Path = ROOT
) -> None:
    """Raise ImportError if a name imports, or would import from here, something other than the package in
    `root`.
    """
    for name in names:
        for place in map(Path, _places(name)):
            if place.resolve() != root / name and not _adds_nothing(place, root / name):
                # With a name, `python -m controller.fit` prints only this line.
                raise ImportError(
                    f"{place} hides Ballast's package {name}. Rename it, or run from another folder",
                    name="controller",
                )


def _places(name: str) -> list[str]:
    module = sys.modules.get(name)
    if module is not None:
        return [*getattr(module, "__path__", [str(module.__file__)])]
    spec = PathFinder.find_spec(name, [str(Path.cwd()), *sys.path])
    if spec is None:  # an editable installation has a separate finder, after this one
        return []
    return [*(spec.submodule_search_locations or [str(spec.origin)])]


def _adds_nothing(place: Path, ours: Path) -> bool:
    """Return True for a folder without modules, because an editable installation still finds `ours`."""
    return (
        place.is_dir()
        and not any(place.glob("*.py"))
        and not (ours / "__init__.py").stat().st_size
    )
