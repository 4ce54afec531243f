"""Compiles loops with Numba if it is installed; otherwise they run in Python, slower and with the same results."""

import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    import numba
except Exception as problem:  # a broken installation may raise anything
    numba = None
    warnings.warn(
        f"Numba cannot be imported ({type(problem).__name__}: {problem}); plans are the same but take longer to make",
        RuntimeWarning,
        stacklevel=2,
    )

COMPILED = numba is not None
"""True if loops are compiled."""


def drop_stale_code(package: Path) -> None:
    """Delete the machine code that Numba has cached from other sources of this package.

    Numba compares a function with its own file alone: it would go on with old code of what the function calls, and
    fail on code that names a module which is gone.
    """
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        digest.update(source.read_bytes())
    stamp = package / "__pycache__" / "compiled_from"
    with suppress(OSError):  # a read-only installation changes as a whole
        if stamp.exists() and stamp.read_text() == digest.hexdigest():
            return
        for code in package.rglob("*.nb[ic]"):
            code.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(digest.hexdigest())


if COMPILED:
    drop_stale_code(Path(__file__).parent)


@contextmanager
def telling_of_compilation(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` when the block compiles something that the disk does not have, the first time."""
    if numba is None:
        yield
        return
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]
        told = False

        def on_start(self, event: object) -> None:
            if not self.told:
                self.told = True
                tell()

        def on_end(self, event: object) -> None:
            """Nothing to say."""

    with event.install_listener("numba:compile", Listener()):
        yield


def compiled(function: Function) -> Function:
    """Compile `function` at its first call and cache the machine code on disk; without Numba, return it unchanged."""
    if numba is None:
        return function
    try:
        return numba.njit(cache=True, nogil=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no cache folder is writable
        return numba.njit(nogil=True)(function)  # type: ignore[no-any-return]
