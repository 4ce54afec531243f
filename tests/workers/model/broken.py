"""Models that rows, or the engine's output layer, would compute wrongly without a word: each breaks one
promise.

They are Qwen2 with a change in the code and none in config.json, so that no list of names or settings can
tell.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from tests.workers.model.tiny import save_tiny_model


class RunningMean(Qwen2MLP):
    """A state that runs along the row, whoever's tokens they are."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        output = super().forward(hidden_states)
        return (
            output.cumsum(1)
            / torch.arange(1, output.shape[1] + 1, device=output.device)[:, None]
        )


class OneShape(Qwen2MLP):
    """Takes rows of 7, 12 and 19 tokens, as a family takes what its authors tried."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.shape[1] not in (7, 12, 19):
            raise RuntimeError("view size is not compatible\nwith a traceback of its own")
        return super().forward(hidden_states)


class Fades(Qwen2MLP):
    """As Llama 4 with `attn_temperature_tuning`: counts from the beginning of the row, and changes at a
    length that no short row reaches.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        floors = (
            torch.arange(hidden_states.shape[1], device=hidden_states.device)
            // self.floor_scale
        )
        return super().forward(hidden_states) / (1 + floors)[:, None]


class Louder(Qwen2ForCausalLM):
    """A factor on the logits that no setting names."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = 1.25 * output.logits
        return output


def with_first_layer(kind: type[Qwen2MLP]) -> type[Qwen2ForCausalLM]:
    class Changed(Qwen2ForCausalLM):
        def __init__(self, config: Qwen2Config) -> None:
            super().__init__(config)
            mlp = self.model.layers[0].mlp
            mlp.__class__ = kind
            mlp.floor_scale = 8192

    return Changed


BROKEN: dict[str, type[Qwen2ForCausalLM]] = {
    "louder": Louder,
    "leaking": with_first_layer(RunningMean),
    "crashing": with_first_layer(OneShape),
    "fading": with_first_layer(Fades),
}
for name, model in BROKEN.items():
    model.config_class = type(name.title() + "Config", (Qwen2Config,), {"model_type": name})
    model.__name__ = name.title()
    AutoConfig.register(name, model.config_class)
    AutoModelForCausalLM.register(model.config_class, model)


def save_broken_model(path: Path, name: str) -> str:
    """The tiny model as one of `BROKEN`, which transformers in this process knows."""
    save_tiny_model(path, head_dim=32)
    return as_broken(path, name)


def as_broken(path: Path, name: str) -> str:
    settings = json.loads((path / "config.json").read_text())
    settings |= {"model_type": name, "architectures": [BROKEN[name].__name__]}
    (path / "config.json").write_text(json.dumps(settings))
    return str(path)
