"""Compiles loops with Numba if it is installed; otherwise they run in Python, slower and with the same results."""

import warnings
from collections.abc import Callable
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


def compiled(function: Function) -> Function:
    """Compile `function` at its first call and cache the machine code on disk; without Numba, return it unchanged."""
    if numba is None:
        return function
    try:
        return numba.njit(cache=True, nogil=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no cache folder is writable
        return numba.njit(nogil=True)(function)  # type: ignore[no-any-return]
