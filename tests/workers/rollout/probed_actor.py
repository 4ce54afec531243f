"""A VllmEngineActor that tells about its engine, a thread, and breaks it. Imports nothing of the driver's."""

import asyncio
import gc
import threading
from dataclasses import replace
from typing import Any

import torch

from workers.engine.weights.weight_transfer import FROZEN_VISION
from workers.rollout.engine_actor import VllmEngineActor


class ProbedActor(VllmEngineActor):
    def _build(self) -> Any:
        """Build the engine, and count the collections of young objects meanwhile."""
        before = gc.get_stats()[0]["collections"]
        engine = super()._build()
        self.collections = gc.get_stats()[0]["collections"] - before
        return engine

    async def collections_of_start(self) -> int:
        return self.collections

    @property
    def core(self) -> Any:
        return self.engine.engine_core._core  # type: ignore[attr-defined]

    async def keep_caches(self, updates: int) -> None:
        """Keep keys and values for so many updates."""
        self._caches.oldest = updates

    async def freeze_vision(self, is_frozen: bool) -> None:
        """From now on, updates bring the vision tower or not."""
        self.model = replace(self.model, train_vision=not is_frozen)
        self.engine.vllm_config.additional_config[FROZEN_VISION] = is_frozen

    async def prefill_tokens(self) -> int:
        """The engine's `max_num_batched_tokens`."""
        return self.engine.vllm_config.scheduler_config.max_num_batched_tokens

    async def norm_kernel(self) -> str:
        """Provider of the model's norms."""
        from vllm import ir

        x = torch.ones(2, 128)
        return ir.ops.fused_add_rms_norm.dispatch(x, x, x[0], 1e-6).provider

    async def watch_steps(self) -> None:
        """From now on, `requests_of_steps` counts."""
        step, self.requests = self.core.step_fn, []

        def counted():
            self.requests.append(sum(self.core.scheduler.get_request_counts()))
            return step()

        self.core.step_fn = counted

    async def requests_of_steps(self) -> list[int]:
        """Requests that the engine knew at each step."""
        return self.requests

    async def give_up_a_command(self) -> None:
        """Stop waiting for a command that the engine's thread has not begun."""
        call, hold = self.engine.engine_core._call, threading.Event()  # type: ignore[attr-defined]
        busy, given_up = (
            asyncio.create_task(call(hold.wait)),
            asyncio.create_task(call(list)),
        )
        await asyncio.sleep(0.1)
        given_up.cancel()
        await asyncio.wait([given_up])
        hold.set()
        await busy

    async def break_after(self, steps: int) -> None:
        """Let the step after `steps` raise."""
        step, left = self.core.step_fn, iter(range(steps))

        def step_or_break():
            if next(left, None) is None:
                raise RuntimeError("out of luck")
            return step()

        self.core.step_fn = step_or_break
