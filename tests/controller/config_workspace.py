"""A folder with everything that a valid configuration names; tests break one thing at a time."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from controller.config import load
from controller.lifecycle.model_checks import check_models
from controller.preflight.checks import check
from tests.controller.tokenizer_file import write_tokenizer
from tests.controller.weight_files import qwen2_weights, write_weight_file
from workers.errors import ConfigError

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 32,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 704,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}

CONFIG = """\
run: {name: test, steps: 10}
model: {path: model}
data: {train: train.jsonl, validation: validation.jsonl, max_prompt_tokens: 32}
batch: {prompts_per_step: 4, mini_batches: 2}
rollout: {samples_per_prompt: 8, sampling: {max_new_tokens: 64}}
reward: {function: "reward.py:reward"}
policy: {data_parallel: 2, max_tokens_per_micro_batch: 4096}
resources: {device: cpu}
"""

# A process of its own may import it, the one that checks and dry-runs may not.
REWARD = """\
import os

assert os.getpid() != {pid}, "the driver has imported users' code"


def reward(response, solution):
    return 0
"""


def write_workspace(folder: Path) -> Path:
    """Model files, data, reward function and `config.yaml` in `folder`; returns the path of config.yaml."""
    write_model(folder / "model")
    record = {"prompt": "1+1=", "solution": "2"}
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "reward.py").write_text(REWARD.format(pid=os.getpid()))
    (folder / "config.yaml").write_text(CONFIG)
    return folder / "config.yaml"


def write_model(folder: Path, **changes: Any) -> None:
    """The files of a small Qwen2, without weights worth loading."""
    folder.mkdir(exist_ok=True)
    description = MODEL | changes
    (folder / "config.json").write_text(json.dumps(description))
    write_weight_file(folder / "model.safetensors", qwen2_weights(description))
    write_tokenizer(folder)


def check_everything(*overrides: str) -> None:
    """Check the workspace's configuration, changed by `overrides`, and its models."""
    config = load("config.yaml", overrides)
    check(config)
    check_models(config)


def refusal(*overrides: str) -> str:
    """The one line with which the workspace's configuration, changed by `overrides`, is refused."""
    with pytest.raises(ConfigError) as caught:
        check_everything(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)
