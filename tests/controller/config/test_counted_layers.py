"""Costs from a model's folder: families with a formula in this process, others in one of their own, once."""

import json
from pathlib import Path
from typing import Any

import pytest

from controller.config import Config, counted_layers
from controller.config.counted_layers import complete_description
from controller.planning.planner import counted_costs
from controller.preflight.time_inputs import shape_of
from tests.balancing.published_models import (
    GEMMA_3_4B,
    KIMI_LINEAR,
    NEMOTRON_H_8B,
    QWEN3_5_9B,
)
from workers.errors import ConfigError

GPT_2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "vocab_size": 50257,
}
GEMMA_4 = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "global_head_dim": 64,
        "intermediate_size": 128,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size": 99,
    },
}
JETMOE = {
    "model_type": "jetmoe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "kv_channels": 16,
    "intermediate_size": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
}
"""Its attention has experts too, which no formula counts."""


def config_of(description: dict[str, Any], folder: Path) -> Config:
    (folder / "config.json").write_text(json.dumps(description))
    config = Config()
    config.model.path = str(folder)
    return config


@pytest.mark.parametrize(
    "description",
    [GPT_2, KIMI_LINEAR, NEMOTRON_H_8B, QWEN3_5_9B, GEMMA_3_4B, GEMMA_4],
    ids=lambda description: description["model_type"],
)
def test_families_with_a_formula_need_no_process(
    description: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        counted_layers, "ask_module", lambda *_: pytest.fail("a process was started")
    )
    config = config_of(description, tmp_path)
    assert complete_description(description) == description
    assert counted_costs(config).quadratic > 0
    assert shape_of(config).kept(100) > 0


def test_another_family_is_counted_once_on_modules_without_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = config_of(JETMOE, tmp_path)
    costs = counted_costs(config)
    queries_of_experts, shared = 2 * 64 * (2 * 16) * 2, 64 * (2 * 16) * 2
    block = 2 * 64 * 96 * 3
    routers = 2 * 64 * 4
    assert (
        costs.linear / 6 == 2 * (queries_of_experts + shared + block + routers) + 64 * 128
    )
    monkeypatch.setattr(
        counted_layers, "ask_module", lambda *_: pytest.fail("it was counted again")
    )
    assert counted_costs(config) == costs


def test_a_family_that_transformers_does_not_build_is_counted_by_the_formula_or_names_its_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        counted_layers, "ask_module", lambda *_: (None, "unknown model_type")
    )
    assert counted_costs(config_of(GPT_2 | {"model_type": "new"}, tmp_path)).linear > 0
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        counted_costs(config_of({"model_type": "other", "hidden_size": 8}, tmp_path))
