"""Models with layers that carry a state go through a run: samples, updates, new weights in the engine, a save.

A run of 40 seconds each. Only here do states of vLLM's kernels meet the weights that the trainer has updated.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    PreTrainedConfig,
    Qwen3_5TextConfig,
)

from examples.addition.warm_start import tokenizer
from tests.end_to_end.test_whole_loop import run_loop

pytestmark = pytest.mark.usefixtures("ray_session")

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
MODELS: dict[str, tuple[PreTrainedConfig, str, float]] = {
    # vLLM's gated delta nets on CPUs compute in bfloat16, with heads of 64 or 128.
    "qwen3_5": (
        Qwen3_5TextConfig(
            **SIZES,
            head_dim=64,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
        ),
        "bfloat16",
        0.05,
    ),
    # vLLM reads block_dim and conv_dim, which stand in published files and not in transformers' class.
    "lfm2": (
        Lfm2Config(
            **SIZES,
            layer_types=["conv", "full_attention"],
            block_auto_adjust_ff_dim=False,
            block_dim=128,
            block_ff_dim=256,
            conv_dim=128,
            conv_dim_out=128,
        ),
        "float32",
        1e-5,
    ),
}
"""Configurations, their dtype, and the largest mean mismatch in nats."""


@pytest.mark.drawn(1)
@pytest.mark.parametrize("family", MODELS)
def test_a_hybrid_trains_on_what_its_engine_samples(
    family: str, settings: list[str], workspace: Path
) -> None:
    """Each update moves log-probs by far more than the mismatch that is allowed."""
    config, dtype, mismatch = MODELS[family]
    folder = workspace / family
    characters = tokenizer()
    config.bos_token_id = None
    config.eos_token_id = characters.eos_token_id
    config.pad_token_id = characters.pad_token_id
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    characters.save_pretrained(folder)
    overrides = [
        *settings,
        f"run.name={family}",
        f"model.path={folder}",
        f"model.dtype={dtype}",
    ]
    run = run_loop(
        [*overrides, "policy.optimizer.learning_rate=1e-2", "run.checkpoint_every=3"]
    )
    steps = run.outcome.steps
    assert [step["rollout/weight_version"] for step in steps] == [1, 2, 3]
    assert all(step["policy/rollout_mismatch_mean"] < mismatch for step in steps)
    assert set(run.versions) == {3}
    saved = AutoModelForCausalLM.from_pretrained(run.folder / "model")
    begun = AutoModelForCausalLM.from_pretrained(folder)
    assert saved.config.architectures == begun.config.architectures
    trained = dict(saved.named_parameters())
    moved = {
        name: float((trained[name].float() - weight).abs().mean())
        for name, weight in begun.named_parameters()
    }
    states = {
        name: change
        for name, change in moved.items()
        if ".linear_attn." in name or ".conv." in name
    }
    assert states and min(states.values()) > 1e-3
