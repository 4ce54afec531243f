"""LoRA adapters of an engine, when several policies are trained from its base model.

peft's files of a policy --load--> vLLM, which reads them        request.adapter --of--> the policy's newest adapters
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.errors import RolloutError
from workers.model_config import LoraConfig
from workers.rollout.engine_options import LORA_RANKS

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


def adapter_arguments(lora: LoraConfig) -> dict[str, Any]:
    """Return engine arguments. Raises StopIteration for a rank above the highest of `LORA_RANKS`."""
    if lora.policies == 1:
        return {}
    rank = next(rank for rank in LORA_RANKS if rank >= lora.rank)
    # One more than policies. Beside requests with adapters, vLLM 0.32 on CPUs takes the last place for those without.
    return {"enable_lora": True, "max_loras": lora.policies + 1, "max_lora_rank": rank}


class EngineAdapters:
    """The newest adapters of each policy, by its name."""

    def __init__(self, engine: "AsyncLLM") -> None:
        self._engine = engine
        self._loaded: dict[str, LoRARequest] = {}

    def of(self, name: str) -> "LoRARequest | None":
        """Return a policy's, or None for the base model, "". Raises RolloutError for an unknown policy."""
        if name and name not in self._loaded:
            raise RolloutError(f"adapter={name!r}: the engine has no such policy. Publish it first.")
        return self._loaded.get(name)

    def version(self, name: str) -> int:
        return self._loaded[name].lora_int_id if name in self._loaded else -1

    async def load(self, name: str, version: int, files: Mapping[str, np.ndarray]) -> None:
        """Replace a policy's adapters, of which no request may be running. files: see `adapter_files`."""
        from vllm.lora.request import LoRARequest

        if old := self._loaded.pop(name, None):
            await self._engine.remove_lora(old.lora_int_id)
        with TemporaryDirectory() as folder:
            for file, data in files.items():
                data.tofile(Path(folder) / file)
            # The prefix cache tells adapters apart by this name, so each version has its own.
            request = LoRARequest(f"{name}@{version}", version, folder)
            await self._engine.add_lora(request)
        self._loaded[name] = request
