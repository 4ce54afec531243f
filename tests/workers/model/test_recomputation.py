"""Gradient checkpointing changes no gradient, and each mode computes again what it says."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.refusals import refused
from tests.workers.model.test_compile import trained
from tests.workers.model.tiny import save_tiny_model
from workers.config.roles import ModelConfig
from workers.model.model import load_model


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", {"share_prefixes": "always", "min_shared_tokens": 1}),
        ("gemma3", {"layout": "padded"}),
        ("gpt_oss", {"dtype": "float32"}),  # biases of experts are added in place
    ],
)
def test_gradients_are_equal_to_the_last_bit_and_products_are_made_once(
    tmp_path, family, settings
):
    path, flops, found = save_tiny_model(tmp_path, family), {}, {}
    modes = {
        mode: {"gradient_checkpointing": mode} for mode in ("none", "selective", "full")
    }
    modes["mixed"] = modes["full"] | {"recompute_num_layers": 1}
    for name, mode in modes.items():
        with FlopCounterMode(display=False) as counter:
            found[name] = trained(path, steps=1, **settings, **mode)
        flops[name] = counter.get_total_flops()
    assert all(
        torch.equal(*pair)
        for name in modes
        for pair in zip(found[name], found["none"], strict=True)
    )
    assert flops["none"] <= flops["selective"] < flops["mixed"] < flops["full"]
    if family != "gpt_oss":
        assert flops["selective"] == flops["none"]


@pytest.mark.parametrize(
    "mode", [{"gradient_checkpointing": "selective", "recompute_num_layers": 1}, {}]
)
def test_no_layer_without_checkpointing_offloads_what_it_saves(model, mode):
    with refused("model.activation_offload"):
        load_model(ModelConfig(path=model, activation_offload=True, **mode), torch.float32)
