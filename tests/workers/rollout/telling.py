"""A rollout worker that tells what its engine was made with; in a module that imports nothing of the driver's."""

from workers.rollout.worker import RolloutWorker


class Telling(RolloutWorker):
    async def prefill_tokens(self) -> int:
        """The engine's `max_num_batched_tokens`."""
        return self.engine.vllm_config.scheduler_config.max_num_batched_tokens
