"""Loading onto several ranks, of which one reads the files, gives every rank exactly what a plain
load would.
"""

import ctypes
import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from tests.refusals import refused
from tests.workers.model.checkpoint.test_checkpoint import train
from tests.workers.model.cpu_engine import assert_same, build_engine, weights
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import random_sequences, save_tiny_model
from workers.config.roles import LoraConfig, ModelConfig, OptimizerConfig
from workers.errors import ConfigError, UnsupportedModelError
from workers.model.checkpoint.lora import add_adapters
from workers.model.model import load_model
from workers.model.value_head import load_value_model

ALL = [(0, 11)]


def load_and_train(
    model: str, lora: LoraConfig
) -> tuple[dict[str, torch.Tensor], torch.Tensor, int, torch.Tensor]:
    """Weights as loaded, log-probs, number of parameters, and the output layer after an update."""
    _spoil_free_memory()
    engine = build_engine(model, lora=lora, optimizer=OptimizerConfig(learning_rate=1e-2))
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float64}
    loaded = weights(engine)
    log_probs, _ = engine.log_probs(random_sequences(), ALL)
    train(engine, range(1))
    return loaded, log_probs, engine.num_parameters, weights(engine)["lm_head.weight"]


def _spoil_free_memory() -> None:
    """What is not filled must not look right by chance: the allocator's next blocks hold NaN."""
    spoiled = [
        torch.full((size,), torch.nan, dtype=torch.float64)
        for size in (4, 8, 32, 48, 1024)
        for _ in range(50)
    ]
    del spoiled


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("family", "tied", "lora"),
    [
        ("qwen2", True, LoraConfig()),
        ("llama", False, LoraConfig()),
        ("qwen3", True, LoraConfig(rank=2)),
    ],
    ids=["tied", "untied", "adapters"],
)
@pytest.mark.parametrize("count", [2, 4])
def test_one_rank_that_reads_for_all_equals_a_plain_load(
    tmp_path, ranks: RankPool, family, tied, lora, count
):
    model = save_tiny_model(tmp_path / "model", family, tie_word_embeddings=tied)
    expected = load_and_train(model, lora)
    for loaded, log_probs, num_parameters, head in ranks.run(
        load_and_train, count, model, lora
    ):
        assert_same(loaded, expected[0])
        torch.testing.assert_close(log_probs, expected[1], rtol=1e-6, atol=1e-6)
        assert num_parameters == expected[2]
        torch.testing.assert_close(head, expected[3], rtol=1e-9, atol=1e-12)


def test_a_skeleton_takes_no_memory(model):
    config = ModelConfig(path=model)
    for load in (load_model, load_value_model):
        skeleton, whole = (
            load(config, torch.float32, skeleton=True),
            load(config, torch.float32),
        )
        assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
        shapes = [
            {name: weight.shape for name, weight in m.state_dict().items()}
            for m in (skeleton, whole)
        ]
        assert shapes[0] == shapes[1]


def error_of_loading(model: str, head: str) -> str:
    with pytest.raises(ConfigError) as error:
        build_engine(model, head=head)
    return str(error.value)


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_weight_missing_from_the_files_is_not_made_up_on_any_rank(
    tmp_path, ranks: RankPool, count, head
):
    path = save_tiny_model(tmp_path)
    weights = load_file(f"{path}/model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, f"{path}/model.safetensors", metadata={"format": "pt"})
    for message in ranks.run(error_of_loading, count, path, head):
        assert "model.norm.weight" in message


def peak_growth(model: str, smaller: str) -> int:
    """Bytes by which this process's largest resident size grows while the engine is built.

    smaller: a model that is built before, so that what its first build imports is not counted.
    """
    build_engine(smaller)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmHWM")
    engine = build_engine(model)
    assert engine.num_parameters > 5e6
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(
        next(line for line in lines if line.startswith(f"{name}:")).split()[1]
    )


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="needs Linux's own peak of a process",
)
def test_ranks_that_do_not_read_hold_little_more_than_their_shards(
    tmp_path, ranks: RankPool
):
    """A model of 47 MB over four ranks: 12 MB of shards, and the few tensors that are being handed out."""
    model = save_tiny_model(
        tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=6
    )
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    (tmp_path / "smaller").mkdir()
    peaks = ranks.run(peak_growth, 4, model, save_tiny_model(tmp_path / "smaller"))
    assert all(peak < 0.8 * size for peak in peaks[1:])


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [
        ("model.layers.0.self_attn.o_proj.bias", True),
        ("model.layers.1.self_attn.k_norm.weight", True),
        ("model.norm.bias", True),
        ("lm_head.bias", True),
        # What a language model is loaded without.
        ("model.visual.blocks.0.mlp.weight", False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", False),
        ("model.layers.0.self_attn.masked_bias", False),
    ],
)
def test_a_weight_that_its_layer_does_not_have_is_refused(
    tmp_path: Path, name: str, is_refused: bool
) -> None:
    path = save_tiny_model(tmp_path, "gemma")
    file = f"{path}/model.safetensors"
    save_file(load_file(file) | {name: torch.ones(32)}, file, metadata={"format": "pt"})
    with refused(name) if is_refused else nullcontext():
        load_model(ModelConfig(path=path), torch.float32)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": "four"},
        {"hidden_size": 31},
        {"layer_types": [1, 2]},
        {"rope_parameters": [1]},
    ],
    ids=str,
)
def test_whatever_transformers_raises_of_a_config_is_one_line(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    path = save_tiny_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with refused("model.path="):
        load_model(ModelConfig(path=path), torch.float32)


def test_a_model_without_linear_modules_takes_no_adapters() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=37, n_embd=32, n_layer=2, n_head=4))
    with refused("model.lora.rank=0", UnsupportedModelError):
        add_adapters(model, LoraConfig(rank=2))
