"""The engine's side of `shared_memory`: a vLLM weight-transfer engine that reads a safetensors file."""

from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from workers.rollout.complete_update import OUTPUT_LAYER, CompleteUpdate


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """path: a safetensors file with every weight of the model under its Hugging Face name."""

    path: str


class _FileEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads whole models from a file, layer by layer: on CPU vLLM keeps linear weights in a packed form of its own,
    which a bare `load_weights` cannot write."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class goes on to torch.accelerator.synchronize(), which a machine without one refuses.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Load the file. Raises ValueError before it changes anything if the output layer is not in it."""
        weights = load_file(update_info.path)
        # The rule would find this too, but after the rest is loaded.
        tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        if tied and OUTPUT_LAYER not in weights:
            raise ValueError(f"the update lacks {OUTPUT_LAYER}, which must be sent even if tied to the embedding.")
        self.model.load_weights(weights.items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


class SharedMemoryWeightTransferEngine(CompleteUpdate, _FileEngine):
    """Loads the whole model from one file; refuses an incomplete one."""
