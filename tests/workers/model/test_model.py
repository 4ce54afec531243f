import json
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from tests.refusals import refused
from tests.workers.model.tiny import save_tiny_model, tiny_config
from workers.batch.dataproto import DataProto
from workers.config.roles import ModelConfig
from workers.model.model import compute_dtype, load_model
from workers.model.pretrained import load_tokenizer
from workers.model.recomputation import checkpoint_layers
from workers.model.rows.packing import pack


@pytest.fixture
def path(tmp_path):
    return save_tiny_model(tmp_path / "model")


def test_dropout_is_never_active(path):
    file = Path(path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_dropout": 0.5}))
    config = ModelConfig(path=path, gradient_checkpointing="full")
    model = load_model(config, torch.float32)
    checkpoint_layers(model.model, model.layers, config, compiled=False)
    attention_modules = [layer.self_attn for layer in model.layers]
    assert all(
        module.attention_dropout == 0.5 and not module.training
        for module in attention_modules
    )
    assert all(layer.training and layer.gradient_checkpointing for layer in model.layers)


def test_loads_in_the_asked_type_without_garbage_in_buffers(path):
    model = load_model(ModelConfig(path=path), torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    expected = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(model.model.get_decoder().rotary_emb.inv_freq, expected)


@pytest.mark.parametrize("missing", ["", "???"])
def test_an_unset_path_is_named(missing):
    with refused("model.path"):
        load_model(ModelConfig(path=missing), torch.float32)


def test_a_missing_folder_is_one_line(tmp_path):
    for load in (
        lambda path: load_model(ModelConfig(path=path), torch.float32),
        load_tokenizer,
    ):
        with refused(f"model.path={tmp_path / 'nowhere'}"):
            load(str(tmp_path / "nowhere"))


def test_a_model_of_the_hub_is_read_from_the_cache_without_a_request(tmp_path, monkeypatch):
    model = tmp_path / "models--tiny--qwen2"
    save_tiny_model(model / "snapshots" / "0")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0")
    asked = []

    def ask(url: str, **options: object) -> None:
        asked.append(url)
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", ask)
    load_model(ModelConfig(path="tiny/qwen2"), torch.float32)
    assert asked == []


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    AutoModelForCausalLM.from_config(tiny_config()).save_pretrained(tmp_path)
    with refused("tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("setting", "device", "chunk"), [(0, "cpu", 256), (0, "cuda", 2048), (64, "cuda", 64)]
)
def test_logits_exist_for_a_chunk_of_tokens_by_device(setting, device, chunk):
    assert ModelConfig(logprob_chunk_tokens=setting).chunk_tokens(device) == chunk


def test_the_models_logits_exist_for_the_chunk_that_is_set(path):
    packed = load_model(ModelConfig(path=path, logprob_chunk_tokens=3), torch.float32)
    row = pack(
        DataProto.from_list(
            [{"input_ids": torch.arange(8), "loss_mask": torch.arange(8) > 0}]
        )
    )
    packed.hidden_states = lambda *_: torch.zeros(7, 32)
    with CountedLinears() as linears:
        packed(row, temperature=1.0)
    assert linears.rows == [3, 3, 1]


class CountedLinears(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            self.rows.append(len(args[0]))
        return function(*args, **(kwargs or {}))


def test_compute_type_by_device():
    assert compute_dtype("auto", torch.device("cpu")) is torch.float32
    assert compute_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert compute_dtype("bfloat16", torch.device("cpu")) is torch.bfloat16
