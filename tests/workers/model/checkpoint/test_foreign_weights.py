"""Weights that do not go with config.json are refused by name when they are loaded, whatever the family."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from tests.refusals import refused
from tests.workers.model.tiny import save_tiny_model
from workers.config import LoraConfig, ModelConfig
from workers.errors import UnsupportedModelError
from workers.model.checkpoint.lora import add_adapters
from workers.model.model import load_model


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [
        ("model.layers.0.self_attn.o_proj.bias", True),
        ("model.layers.1.self_attn.k_norm.weight", True),
        ("model.norm.bias", True),
        ("lm_head.bias", True),
        ("model.visual.blocks.0.mlp.weight", False),  # what a language model is loaded without
        ("model.layers.0.self_attn.rotary_emb.inv_freq", False),
        ("model.layers.0.self_attn.masked_bias", False),
    ],
)
def test_a_weight_that_its_layer_does_not_have_is_refused(tmp_path: Path, name: str, is_refused: bool) -> None:
    path = save_tiny_model(tmp_path, "gemma")
    file = f"{path}/model.safetensors"
    save_file(load_file(file) | {name: torch.ones(32)}, file, metadata={"format": "pt"})
    with refused(name) if is_refused else nullcontext():
        load_model(ModelConfig(path=path), torch.float32)


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": "four"}, {"hidden_size": 31}, {"layer_types": [1, 2]}, {"rope_parameters": [1]}],
    ids=str,
)
def test_whatever_transformers_raises_of_a_config_is_one_line(tmp_path: Path, changes: dict[str, object]) -> None:
    path = save_tiny_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with refused("model.path="):
        load_model(ModelConfig(path=path), torch.float32)


def test_a_model_without_linear_modules_takes_no_adapters() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=37, n_embd=32, n_layer=2, n_head=4))
    with refused("model.lora.rank=0", UnsupportedModelError):
        add_adapters(model, LoraConfig(rank=2))
