"""LoRA adapters of an engine, which computes them beside the base model.

one policy          peft's files --replace--> vLLM, in place: requests in flight continue with them
several policies    peft's files --load--> vLLM     request.adapter --of--> adapters of this version
"""

from collections.abc import Awaitable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.config.model import ALL_LINEAR, ModelConfig
from workers.engine.engine_options import LORA_RANKS
from workers.errors import RolloutError
from workers.model.weight_files import weight_shapes

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

NAME = "policy"
"""vLLM's name for the adapters of the only policy."""
OTHER_NAMES = {"shared_expert_gate": "expert_gate"}
"""vLLM's second name for a module, by which it is called. Without it, its adapter is loaded, not computed."""
NOT_ADAPTED = {"embed_tokens", "lm_head"}
EXPERTS = "experts"
"""vLLM's name for the experts of a layer."""


def adapter_arguments(model: ModelConfig) -> dict[str, Any]:
    """Return engine arguments. Raises StopIteration for a rank above the highest of `LORA_RANKS`."""
    lora = model.lora
    if not lora.sends_adapters:
        return {}
    rank = next(rank for rank in LORA_RANKS if rank >= lora.rank)
    count = lora.policies * lora.versions if lora.policies > 1 else 1
    arguments = {"enable_lora": True, "max_loras": count, "max_lora_rank": rank}
    return arguments | _modules_beside_experts(model)


def _modules_beside_experts(model: ModelConfig) -> dict[str, Any]:
    """Return an argument with the modules of a mixture of experts that are adapted. By default vLLM keeps
    room for adapters of every expert, and computes them with another kernel.

    `all-linear` is every matrix in the files, some of which get no adapter. The trainer's code would tell
    them apart, but imports Numba, which vLLM's start on a CPU stumbles over.
    """
    shapes = weight_shapes(_folder(model.path))
    matrices = {
        name
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight")
    }
    beside = {name for name in matrices if EXPERTS not in name.split(".")}
    if not any(EXPERTS in name.split(".") for name in shapes):
        return {}
    names = {name.split(".")[-2] for name in beside} - NOT_ADAPTED
    if model.lora.target_modules != ALL_LINEAR:
        names = {name.strip() for name in model.lora.target_modules.split(",")}
    names |= {OTHER_NAMES[name] for name in names if name in OTHER_NAMES}
    if not model.lora.target_parameters:
        return {"lora_target_modules": sorted(names)}
    return {
        "lora_target_modules": [*sorted(names), EXPERTS],
        "enable_mixed_moe_lora_format": True,
    }


def _folder(path: str) -> Path:
    from transformers.utils import cached_file

    return (
        Path(path) if Path(path).is_dir() else Path(cached_file(path, "config.json")).parent
    )


class EngineAdapters:
    """Adapters of one policy, or of several by the version of the weights in which they were published."""

    def __init__(self, engine: "AsyncLLM") -> None:
        self._engine = engine
        self._loaded: dict[int, LoRARequest] = {}
        self._only: LoRARequest | None = None

    def of(self, version: int) -> "LoRARequest | None":
        """Return a version's. 0: the only policy's, or None for the base model of several policies.

        Raises RolloutError for a version that is not there.
        """
        if not version:
            return self._only
        if version not in self._loaded:
            raise RolloutError(
                f"adapter={version}: the engine does not have this version. Publish the policy."
            )
        return self._loaded[version]

    async def replace(self, files: Mapping[str, np.ndarray]) -> None:
        """Load the only policy's adapters in place of its earlier ones. files: see `adapter_files`.

        Keys and values that the earlier ones computed have the same name in vLLM's prefix cache: requests
        tell them apart by their salt (`KeptCaches`), as after any update.
        """
        from vllm.lora.request import LoRARequest

        with TemporaryDirectory() as folder:
            _write_files(files, folder)
            await self._engine.add_lora(
                LoRARequest(NAME, 1, folder, load_inplace=True, is_3d_lora_weight=True)
            )
            # It is loaded: its folder is not read again.
            self._only = LoRARequest(NAME, 1, folder, is_3d_lora_weight=True)

    async def load(
        self, adapters: Mapping[int, Awaitable[Mapping[str, np.ndarray]]]
    ) -> None:
        """Have these versions alone. No request of another may be running. adapters: see `adapter_files`."""
        from vllm.lora.request import LoRARequest

        for old in self._loaded.keys() - adapters.keys():
            await self._engine.remove_lora(self._loaded.pop(old).lora_int_id)
        for version, files in adapters.items():
            if version in self._loaded:
                continue
            with TemporaryDirectory() as folder:
                _write_files(await files, folder)
                # The prefix cache tells adapters apart by this name.
                request = LoRARequest(
                    f"version-{version}", version, folder, is_3d_lora_weight=True
                )
                await self._engine.add_lora(request)
            self._loaded[version] = request


def _write_files(files: Mapping[str, np.ndarray], folder: str) -> None:
    for name, data in files.items():
        data.tofile(Path(folder) / name)
