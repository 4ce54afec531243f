"""Pause Python's garbage collector while a process imports and builds what it keeps until its end."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collections_paused() -> Iterator[None]:
    """Collect no garbage in the block, except where code asks for it.

    vLLM and torch import a million objects that stay. The collector would walk them all again and again: a
    fifth of an import's CPU seconds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
