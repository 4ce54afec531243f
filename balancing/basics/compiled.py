"""Compile loops with Numba if installed. Otherwise they run in Python, slower, with the same results."""

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
        f"Numba cannot be imported ({type(problem).__name__}: {problem}). Plans are the same but take "
        "longer to make.",
        RuntimeWarning,
        stacklevel=2,
    )

# NUMBA_DISABLE_JIT=1 leaves functions as they are, without `stats` and without a cache.
COMPILED = numba is not None and not numba.config.DISABLE_JIT
PACKAGE = Path(__file__).parents[1]
"""All of `balancing`: loops of its rooms call those of `basics`."""


def drop_stale_code(package: Path) -> None:
    """Delete machine code that Numba has cached from other sources of this package.

    Numba compares a function only with its own file, so it would reuse stale code of the functions that it
    calls. Only files with compiled functions count: with all files, a comment in an error's text cost 41 s.
    """
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        text = source.read_bytes()
        if b"@compiled" in text or source.name == "compiled.py":
            digest.update(text)
    stamp = package / "__pycache__" / "compiled_from"
    with suppress(OSError):  # a read-only installation changes only as a whole
        if stamp.exists() and stamp.read_text() == digest.hexdigest():
            return
        for code in package.rglob("*.nb[ic]"):
            code.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(digest.hexdigest())


if COMPILED:
    drop_stale_code(PACKAGE)


@contextmanager
def telling_of_compilation(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` once when the block first compiles something that is not cached on disk."""
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
            """Do nothing."""

    with event.install_listener("numba:compile", Listener()):
        yield


def compiled(function: Function) -> Function:
    """Compile at the first call and cache the machine code on disk. Without Numba, return `function`
    unchanged.
    """
    if numba is None:
        return function
    try:
        return numba.njit(cache=True, nogil=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no cache folder is writable
        return numba.njit(nogil=True)(function)  # type: ignore[no-any-return]
