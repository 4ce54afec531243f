"""The engine's side of `shared_memory`: a vLLM weight-transfer engine that reads a safetensors file."""

from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

OUTPUT_LAYER = "lm_head.weight"


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """path: a safetensors file with every weight of the model under its Hugging Face name."""

    path: str


class SharedMemoryWeightTransferEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
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
        """Load the file. Raises ValueError, naming the weights, if the model would keep some of its old ones."""
        try:
            self._load(load_file(update_info.path))
        except Exception:
            self.finish_weight_update()  # layers that got nothing have their old weights back
            raise

    def _load(self, weights: dict[str, Tensor]) -> None:
        self._refuse_untold_output_layer(weights)
        expected = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        missing = expected - self.model.load_weights(weights.items())
        if missing:
            raise ValueError(f"the update brought nothing for {sorted(missing)}, which would keep their old values.")

    def _refuse_untold_output_layer(self, weights: dict[str, Tensor]) -> None:
        # With tied embeddings vLLM would load the rest and keep sampling from the old output layer without a word.
        tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        if tied and OUTPUT_LAYER not in weights:
            raise ValueError(f"the update lacks {OUTPUT_LAYER}, which must be sent even if tied to the embedding.")

    def finish_weight_update(self) -> None:
        """Put the new weights in place; layers that got none keep what they had."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass
