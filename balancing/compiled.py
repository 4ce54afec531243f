"""Loops that NumPy has no word for, compiled by Numba where it is there and works."""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    import numba
except Exception as problem:  # a broken installation raises whatever it likes
    numba = None
    warnings.warn(
        f"Numba cannot be imported ({type(problem).__name__}: {problem}); plans are the same but take longer to make",
        RuntimeWarning,
        stacklevel=2,
    )

COMPILED = numba is not None
"""Whether loops are compiled; otherwise the same code runs in Python."""


def compiled(function: Function) -> Function:
    """Compile `function` at its first call and keep the machine code on disk; without Numba, return it as it is."""
    if numba is None:
        return function
    try:
        return numba.njit(cache=True, nogil=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no folder to cache in can be written to
        return numba.njit(nogil=True)(function)  # type: ignore[no-any-return]
