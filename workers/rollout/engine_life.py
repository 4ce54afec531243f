"""An engine may die at any time: calls that notice it, its reason, and an end of all its processes."""

import asyncio
import traceback
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

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
    cause = death.__cause__
    if cause:
        return f"{type(cause).__name__}: {cause if str(cause) else _last_line(cause)}"
    return "its log is in Ray's session folder, logs/worker-*."


def _last_line(error: BaseException) -> str:
    """Return the line that raised, of an error without a text, as a library's assertion."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].line} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


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
