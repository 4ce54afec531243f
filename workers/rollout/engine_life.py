"""An engine may die at any time: calls that notice it, its reason, and an end of all its processes."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from workers.engine.root_cause import describe, recorded_cause

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

STOP_SECONDS = 10.0
ALIVE_SECONDS = 1.0  # between checks that a silent engine is alive
T = TypeVar("T")


async def wait_while_alive(engine: "AsyncLLM", call: Awaitable[T]) -> T:
    """Wait for the call. Raises EngineDeadError if the engine dies meanwhile."""
    from vllm.v1.engine.exceptions import EngineDeadError

    task = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({task}, timeout=ALIVE_SECONDS))[0]:
            if engine.errored:  # a process that died in a collective never answers
                raise EngineDeadError()
        return await task
    finally:
        task.cancel()


def describe_death(death: Exception) -> str:
    """Return why an engine died: on a CPU the error has its cause, on GPUs its processes recorded it."""
    if death.__cause__:
        return describe(death.__cause__)
    return recorded_cause() or "its log is in Ray's session folder, logs/worker-*."


def end_engine(engine: "AsyncLLM | None") -> None:
    """Shut the engine down, and end all processes below this one."""
    import psutil

    processes = psutil.Process().children(recursive=True)
    if engine is not None:
        engine.shutdown(timeout=STOP_SECONDS)
    for process in processes:  # processes still being built, or late to end
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, STOP_SECONDS)
