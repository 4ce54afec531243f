"""A rollout worker that tells what its engine was made with; in a module that imports nothing of the driver's."""

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
