"""vLLM's scheduler and model in a thread of the actor. `AsyncLLM` normally runs them in a separate process.

    AsyncLLM --commands, futures--> [thread: commands between two steps, steps while requests wait]
        ^------------ outputs of a step, as they are, no serialisation -------------|

On a CPU a second process competes for cores: it loads vLLM again (12 s) and serialises every step's tokens (a
seventh of a small model's time). Commands of one turn of the event loop are passed on together, so that a
round's requests are all in its first step.

The actor must not import Numba first: on a CPU without Triton vLLM 0.32 inspects all loaded modules, and
fails on an object of llvmlite that has every attribute.
"""

import asyncio
import gc
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError

JOIN_SECONDS = 10.0
Command = Callable[[], None]


@dataclass
class Resources:
    """The part of a client that `AsyncLLM` reads."""

    engine_dead: bool = False
    cause: BaseException | None = None

    def error(self) -> EngineDeadError:
        error = EngineDeadError()
        error.__cause__ = self.cause
        return error


class EngineThread(EngineCoreClient):
    """The part of vLLM's asynchronous client that one engine without data parallelism uses."""

    engine_ranks_managed = (0,)

    def __init__(
        self, vllm_config: Any, executor_class: Any, log_stats: bool, **_of_processes: Any
    ) -> None:
        self.resources = Resources()
        self._core = EngineCore(vllm_config, executor_class, log_stats)
        self._commands: queue.SimpleQueue[list[Command] | None] = queue.SimpleQueue()
        self._gathered: list[Command] = []  # by the turn of the event loop that runs now
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._obey():
                outputs, model_executed = self._core.step_fn()
                for output in (outputs or {}).values():
                    self._deliver(output)
                self._core.post_step(model_executed)
        except BaseException as error:
            self.resources.engine_dead, self.resources.cause = True, error
            self._deliver(error)
            raise
        finally:
            self._refuse_commands()
            self._core.shutdown()

    def _obey(self) -> bool:
        """Run queued commands, waiting while there is no request. Returns False to end the thread."""
        while not (self._commands.empty() and self._core.scheduler.has_requests()):
            commands = self._commands.get()
            if commands is None:
                return False
            for command in commands:
                command()
        return True

    def _deliver(self, output: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)

    def _refuse_commands(self) -> None:
        """Fail queued commands, so that no caller waits for an ended thread."""
        with suppress(queue.Empty):
            while True:
                for command in self._commands.get_nowait() or ():
                    command()
        self._commands.put(None)  # may have been among them, before the thread saw it

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function between two steps. Raises EngineDeadError if the thread ended."""
        self._loop = asyncio.get_running_loop()
        answer: Future[Any] = Future()

        def command() -> None:
            if not answer.set_running_or_notify_cancel():  # its caller has gone
                return
            if self.resources.engine_dead:
                answer.set_exception(self.resources.error())
                return
            try:
                answer.set_result(function(*arguments))
            except Exception as error:
                answer.set_exception(error)

        if self.resources.engine_dead:
            raise self.resources.error()
        if not self._gathered:
            self._loop.call_soon(self._hand_over)
        self._gathered.append(command)
        return await asyncio.wrap_future(answer)

    def _hand_over(self) -> None:
        """Pass on gathered commands, even to a thread that has ended."""
        gathered = self._gathered
        self._gathered = []
        self._commands.put(gathered)
        if self.resources.engine_dead:
            self._refuse_commands()

    async def get_output_async(self) -> Any:
        self._loop = asyncio.get_running_loop()
        output = await self._outputs.get()
        if isinstance(output, BaseException):
            raise self.resources.error()
        return output

    async def add_request_async(self, request: Any) -> None:
        await self._call(
            self._core.add_request, *self._core.preprocess_add_request(request)
        )

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self.resources.engine_dead:
            await self._call(self._core.abort_requests, request_ids)

    async def pause_scheduler_async(
        self, mode: Any = "abort", clear_cache: bool = True
    ) -> None:
        await self._call(self._core.pause_scheduler, mode, clear_cache)

    async def resume_scheduler_async(self) -> None:
        await self._call(self._core.resume_scheduler)

    async def is_scheduler_paused_async(self) -> Any:
        return await self._call(self._core.is_scheduler_paused)

    async def set_weight_version_async(self, weight_version: str) -> None:
        await self._call(self._core.set_weight_version, weight_version)

    async def get_weight_version_async(self) -> Any:
        return await self._call(self._core.get_weight_version)

    async def get_supported_tasks_async(self) -> Any:
        return await self._call(self._core.get_supported_tasks)

    async def reset_encoder_cache_async(self) -> None:
        await self._call(self._core.reset_encoder_cache)

    async def reset_mm_cache_async(self) -> None:
        await self._call(self._core.reset_mm_cache)

    async def add_lora_async(self, lora_request: Any) -> Any:
        return await self._call(self._core.add_lora, lora_request)

    async def remove_lora_async(self, lora_id: int) -> Any:
        return await self._call(self._core.remove_lora, lora_id)

    async def collective_rpc_async(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        return await self._call(self._core.collective_rpc, method, timeout, args, kwargs)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the thread after its current step, waiting at most `timeout` seconds."""
        self.resources.engine_dead = True
        self._commands.put(None)
        self._thread.join(JOIN_SECONDS if timeout is None else timeout)


def engine_in_a_thread(arguments: Any) -> AsyncLLM:
    """Build a one-process engine from `AsyncEngineArgs`."""
    # vLLM collects garbage five times while it builds an engine: this takes what is imported out of its way.
    gc.freeze()
    client_factory = EngineCoreClient.__dict__["make_async_mp_client"]
    # vLLM has no setting for it (`make_client`'s TODO).
    EngineCoreClient.make_async_mp_client = EngineThread  # type: ignore[method-assign, assignment]
    try:
        return AsyncLLM.from_engine_args(arguments)
    finally:
        EngineCoreClient.make_async_mp_client = client_factory  # type: ignore[method-assign]
