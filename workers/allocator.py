"""Settings of torch's CUDA allocator in training ranks.

Rows differ in length, so blocks of fixed segments fit no later row, and the rest of a segment is lost.
Expandable segments grow and shrink instead. A process shares them with others over file descriptors, more
slowly and not from every container, so memory for CUDA IPC is allocated in fixed ones. A user's own
PYTORCH_ALLOC_CONF wins.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
NAME = "expandable_segments"


def settings(environment: dict[str, str] | None = None) -> str:
    """Return the user's settings, or ours."""
    variables = os.environ if environment is None else environment
    return next(filter(None, map(variables.get, VARIABLES)), f"{NAME}:True")


def use_settings() -> None:
    _set(settings())


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Inside, take new memory from segments of fixed size, which CUDA IPC shares. Free expandable ones are
    not used.
    """
    # torch resets whatever a text leaves out.
    parts = [part for part in settings().split(",") if not part.strip().startswith(NAME)]
    _set(",".join([*parts, f"{NAME}:False"]))
    try:
        yield
    finally:
        use_settings()


def _set(text: str) -> None:
    import torch

    torch._C._accelerator_setAllocatorSettings(text)
