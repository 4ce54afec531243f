import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.workers.model.tiny import VOCABULARY, save_tiny_model, tiny_config
from workers.config import ModelConfig
from workers.errors import ConfigError, UnsupportedModelError
from workers.model.model import check_supported, compute_dtype, load_model, load_tokenizer, packed_causal_lm

TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (tiny_config("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1), "sliding_attention"),
        (transformers.MistralConfig(**TINY, sliding_window=8), "sliding_window"),
        (transformers.Gemma2Config(**TINY), "attn_logit_softcapping"),
        (transformers.Gemma2Config(**TINY), "final_logit_softcapping"),
        (transformers.CohereConfig(**TINY, logit_scale=0.5), "logit_scale"),
        (transformers.GraniteConfig(**TINY, logits_scaling=8.0), "logits_scaling"),
    ],
)
def test_models_that_packing_would_change_are_refused_by_name(config, feature):
    with pytest.raises(UnsupportedModelError, match=f"{type(config).__name__} uses .*{feature}"):
        check_supported(config)


@pytest.mark.parametrize(
    "config",
    [
        tiny_config("qwen2", sliding_window=8, use_sliding_window=False),
        tiny_config("qwen3"),
        tiny_config("llama"),
        transformers.MistralConfig(**TINY, sliding_window=None),
        transformers.GemmaConfig(**TINY),
        transformers.Qwen3MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    ],
    ids=lambda config: config.model_type,
)
def test_supported_families_are_accepted(config):
    check_supported(config)


def test_attention_sinks_are_refused():
    config = transformers.GptOssConfig(**TINY, num_local_experts=2, layer_types=["full_attention"] * 2)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match="GptOssForCausalLM uses attention sinks"):
        packed_causal_lm(model, ModelConfig())


def test_a_model_with_its_own_attention_code_is_refused():
    model = AutoModelForCausalLM.from_config(
        transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2)
    )
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM does not take an attention function"):
        packed_causal_lm(model, ModelConfig())


@pytest.fixture
def path(tmp_path):
    return save_tiny_model(tmp_path / "model")


def test_dropout_is_never_active(path):
    with open(f"{path}/config.json") as file:
        config = json.load(file)
    with open(f"{path}/config.json", "w") as file:
        json.dump({**config, "attention_dropout": 0.5}, file)
    model = load_model(ModelConfig(path=path, gradient_checkpointing=True), torch.float32)
    attention_modules = [layer.self_attn for layer in model.layers]
    assert all(module.attention_dropout == 0.5 and not module.training for module in attention_modules)
    assert all(layer.training and layer.gradient_checkpointing for layer in model.layers)


def test_loads_in_the_asked_type_without_garbage_in_buffers(path):
    model = load_model(ModelConfig(path=path), torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    expected = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(model.model.get_decoder().rotary_emb.inv_freq, expected)


@pytest.mark.parametrize("missing", ["", "???"])
def test_an_unset_path_is_named(missing):
    with pytest.raises(ConfigError, match=r"model\.path is not set"):
        load_model(ModelConfig(path=missing), torch.float32)


def test_a_missing_folder_is_one_line(tmp_path):
    for load in (lambda path: load_model(ModelConfig(path=path), torch.float32), load_tokenizer):
        with pytest.raises(ConfigError, match=r"model\.path=.*nowhere") as error:
            load(str(tmp_path / "nowhere"))
        assert "\n" not in str(error.value)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    AutoModelForCausalLM.from_config(tiny_config()).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_weights_missing_from_the_file_are_not_made_up(path):
    weights = load_file(f"{path}/model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, f"{path}/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights, the first is model\.norm\.weight"):
        load_model(ModelConfig(path=path), torch.float32)


def test_compute_type_by_device():
    assert compute_dtype("auto", torch.device("cpu")) is torch.float32
    assert compute_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert compute_dtype("bfloat16", torch.device("cpu")) is torch.bfloat16
    with pytest.raises(ConfigError, match=r"model\.dtype=int8"):
        compute_dtype("int8", torch.device("cpu"))
