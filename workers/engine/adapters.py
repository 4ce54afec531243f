"""LoRA adapters of an engine, when several policies are trained from its base model.

peft's files of a policy --load--> vLLM, which reads them     request.adapter --of--> adapters of this version
"""

from collections.abc import Awaitable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.config.model import LoraConfig
from workers.engine.engine_options import LORA_RANKS
from workers.errors import RolloutError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


def adapter_arguments(lora: LoraConfig) -> dict[str, Any]:
    """Return engine arguments. Raises StopIteration for a rank above the highest of `LORA_RANKS`."""
    if lora.policies == 1:
        return {}
    rank = next(rank for rank in LORA_RANKS if rank >= lora.rank)
    return {"enable_lora": True, "max_loras": lora.policies * lora.versions, "max_lora_rank": rank}


class EngineAdapters:
    """Adapters of all policies, by the version of the weights in which they were published."""

    def __init__(self, engine: "AsyncLLM") -> None:
        self._engine = engine
        self._loaded: dict[int, LoRARequest] = {}

    def of(self, version: int) -> "LoRARequest | None":
        """Return a version's, or None for the base model, 0. Raises RolloutError for a version that is not
        there.
        """
        if version and version not in self._loaded:
            raise RolloutError(
                f"adapter={version}: the engine does not have this version. Publish the policy."
            )
        return self._loaded.get(version)

    async def load(self, adapters: Mapping[int, Awaitable[Mapping[str, np.ndarray]]]) -> None:
        """Have these versions alone. No request of another may be running. adapters: see `adapter_files`."""
        from vllm.lora.request import LoRARequest

        for old in self._loaded.keys() - adapters.keys():
            await self._engine.remove_lora(self._loaded.pop(old).lora_int_id)
        for version, files in adapters.items():
            if version in self._loaded:
                continue
            with TemporaryDirectory() as folder:
                for file, data in (await files).items():
                    data.tofile(Path(folder) / file)
                # The prefix cache tells adapters apart by this name.
                request = LoRARequest(f"version-{version}", version, folder)
                await self._engine.add_lora(request)
            self._loaded[version] = request
