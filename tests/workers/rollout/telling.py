"""A rollout worker that tells about its engine; in a module that imports nothing of the driver's."""

import asyncio
import threading

import torch

from workers.rollout.worker import RolloutWorker


class Telling(RolloutWorker):
    async def prefill_tokens(self) -> int:
        """The engine's `max_num_batched_tokens`."""
        return self.engine.vllm_config.scheduler_config.max_num_batched_tokens

    async def norm_kernel(self) -> str:
        """Who computes a norm of the model here: a provider of vLLM's operator."""
        from vllm import ir

        x = torch.ones(2, 128)
        return ir.ops.fused_add_rms_norm.dispatch(x, x, x[0], 1e-6).provider

    async def watch_steps(self) -> None:
        """From now on, `requests_of_steps` counts."""
        core = self.engine.engine_core._core  # type: ignore[attr-defined]
        step, self.requests = core.step_fn, []

        def counted():
            self.requests.append(sum(core.scheduler.get_request_counts()))
            return step()

        core.step_fn = counted

    async def requests_of_steps(self) -> list[int]:
        """Requests that the engine knew at each step."""
        return self.requests

    async def give_up_a_command(self) -> None:
        """Stop waiting for a command that the engine's thread has not begun."""
        call, hold = self.engine.engine_core._call, threading.Event()  # type: ignore[attr-defined]
        busy, given_up = asyncio.create_task(call(hold.wait)), asyncio.create_task(call(list))
        await asyncio.sleep(0.1)
        given_up.cancel()
        await asyncio.wait([given_up])
        hold.set()
        await busy
