"""Counts of layers, against models that transformers builds without storage, and names against
its classes.
"""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from balancing import CostModel
from balancing.counted_families import COUNTED_FAMILIES
from balancing.errors import CostModelError
from balancing.model_counts import count_layers, forward_flops
from balancing.model_fields import Fields
from balancing.time_model import ModelShape
from tests.balancing.published_models import PUBLISHED
from tests.benchmarks.families.shrinking import tiny_config
from workers.model.memory.weight_counts import count_weights
from workers.model.rules.layer_sizes import head_sizes, kv_bytes

FAMILIES = sorted(
    COUNTED_FAMILIES & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING.keys())
)
OTHERS = (
    "doge",
    "gemma3n_text",
    "hunyuan_v1_moe",
    "jetmoe",
    "longcat_flash",
    "mimo_v2_flash",
    "moshi",
)
OTHERS += ("recurrent_gemma", "rwkv", "whisper", "xlnet", "zaya")
"""Families without a formula here, whose weights are counted on modules without storage."""
GEMMA_4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
WITHOUT_COUNT = {"blt", "gemma4_assistant", "gemma4_unified_assistant", "rwkv", "zamba"}
"""Families whose sizes are in several parts, or have other names. The formula's message names a field."""


ELEMENTWISE = (
    "conv.weight",
    "conv1d.weight",
    "conv_1d.weight",
    "A_log",
    "e_score_correction_bias",
)


def matrix_weights(config: PreTrainedConfig) -> float:
    """Count the weights that a token's products read, an expert by its share, in a model without storage."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tables = {table.weight for table in model.modules() if isinstance(table, nn.Embedding)}
    fields, total = Fields(config), 0.0
    experts = fields.integer("num_experts", default=0)
    share = fields.integer("num_experts_per_tok") / experts if experts else 1.0
    for name, weight in model.named_parameters():
        if weight.ndim >= 2 and weight not in tables and not name.endswith(ELEMENTWISE):
            is_expert = ".experts." in name or (weight.ndim == 3 and len(weight) == experts)
            total += weight.numel() * (share if is_expert else 1.0)
    head = model.get_output_embeddings()
    return total + (head.weight.numel() if head.weight in tables else 0)


def counted_weights(config: PreTrainedConfig | dict[str, Any]) -> float:
    """Count the formula's weights, head included."""
    fields = Fields(config)
    head = fields.integer("hidden_size") * fields.integer("vocab_size")
    return sum(layer.weights for layer in count_layers(fields)) + head


@pytest.mark.drawn(12, always=["kimi_linear", "llama4_text", "nemotron_h", "qwen3_5_text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_s_weights_are_those_of_its_model(family: str) -> None:
    config = tiny_config(family).get_text_config()
    assert counted_weights(config) == pytest.approx(matrix_weights(config), rel=0.02)
    assert forward_flops(config) == forward_flops(config.to_dict())


@pytest.mark.drawn(4, always=["gemma3n_text"])
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_weights_are_counted_on_their_modules(family: str) -> None:
    assert family not in COUNTED_FAMILIES
    config = tiny_config(family)
    counted = count_weights(config.to_dict())
    head = Fields(counted).integer("hidden_size") * Fields(counted).integer("vocab_size")
    weights = sum(layer for layer, _ in counted["counted_layers"]) + head
    assert weights == pytest.approx(matrix_weights(config), rel=0.02)
    if family != "rwkv":  # which has no heads
        assert counted_weights(counted) == weights


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_of_published_models_are_counted_by_their_kind(name: str) -> None:
    model = PUBLISHED[name]
    layers = count_layers(Fields(model.config))
    assert sum(layer.squared for layer in layers) == model.squared
    assert sum(layer.kv for layer in layers) == model.kv
    assert sum(layer.state for layer in layers) == model.state
    assert CostModel.from_model_config(model.config).windows == model.windows


@pytest.mark.drawn(4, always=["Kimi-Linear-48B-A3B", "Llama-4-Maverick"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_of_published_models_are_those_of_their_modules(name: str) -> None:
    config = PUBLISHED[name].config
    layers = count_layers(Fields(config))
    counted = count_weights(config)["counted_layers"]
    assert [layer.weights for layer in layers] == pytest.approx(
        [weights for weights, _ in counted], rel=0.001
    )
    assert [layer.expert for layer in layers] == pytest.approx(
        [expert for _, expert in counted]
    )


def test_attention_of_qwen3_next_equals_the_rest_at_73_000_tokens() -> None:
    cost = CostModel.from_model_config(PUBLISHED["Qwen3-Next-80B-A3B"].config)
    assert cost.linear / cost.quadratic == pytest.approx(73_000, rel=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        EXPERTS,
    ],
    ids=["head sizes", "keys are values", "shared keys", "experts"],
)
def test_gemma_4_layer_by_layer(options: dict[str, Any]) -> None:
    plain = {
        name: value
        for name, value in tiny_config("gemma4_text").to_dict().items()
        if name != "per_layer_config"
    }
    config = CONFIG_MAPPING["gemma4_text"](
        **plain | GEMMA_4 | {"global_head_dim": 64} | options
    )
    counted = forward_flops(config)
    assert counted[0] / 2 == pytest.approx(matrix_weights(config), rel=0.005)
    assert counted[1] == 2 * 4 * (32 + 64) * 2  # heads of 32 and of 64, on two layers each
    raw = plain | GEMMA_4 | {"global_head_dim": 64} | options  # as Google's files have it
    assert forward_flops(raw) == counted == forward_flops({"text_config": raw})


@pytest.mark.parametrize("pattern", ["M*-E", "MM-*", "M-*E" * 3])
def test_a_layer_of_nemotron_h_is_a_state_attention_or_feed_forward(pattern: str) -> None:
    saved = {
        name: value
        for name, value in tiny_config("nemotron_h").to_dict().items()
        if name != "layers_block_type"
    }
    raw = saved | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    config = CONFIG_MAPPING["nemotron_h"](**raw)
    counted = forward_flops(raw)
    assert counted == forward_flops(config)
    assert counted_weights(raw) == pytest.approx(matrix_weights(config), rel=0.005)
    products = sum(layer.products for layer in count_layers(Fields(raw)))
    assert products == pattern.count("M") * 2 * 4 * 64 * 8
    assert counted[0] / 2 == counted_weights(raw) + products
    assert counted[1] == pattern.count("*") * 2 * 4 * 32
    assert [layer.squared > 0 for layer in count_layers(Fields(raw))] == [
        letter == "*" for letter in pattern
    ]
    assert ModelShape.from_model_config(raw).kv == pattern.count("*") * 2 * 2 * 32


def test_names_are_those_of_transformers_classes() -> None:
    """Each field is read as transformers' `attribute_map` gives it, in every family of causal language
    models.
    """
    read = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
    )
    read += ("head_dim", "intermediate_size", "moe_intermediate_size", "n_shared_experts")
    differing = {}
    for family in sorted(
        set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING.keys())
    ):
        for name, other in (CONFIG_MAPPING[family].attribute_map or {}).items():
            # A causal model has only the decoder.
            of_decoder = other.replace("encoder_", "decoder_")
            if name in read and Fields({of_decoder: 7}).get(name) != 7:
                differing[family, name] = other
    # Counted as latent attention.
    assert differing == {("glm4_moe_lite", "head_dim"): "qk_rope_head_dim"}


def test_each_family_is_counted_or_the_field_named() -> None:
    missing = {}
    for family in sorted(
        set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING.keys())
    ):
        try:
            config = tiny_config(family)
        except Exception:  # a configuration that transformers itself does not make
            continue
        try:
            assert CostModel.from_model_config(config).linear > 0, family
        except CostModelError as error:
            missing[family] = str(error)
    assert set(missing) == WITHOUT_COUNT, missing
    assert all("the model config has no " in text for text in missing.values())


def test_heads_and_keys_of_each_layer_are_read_from_a_loaded_gemma_4() -> None:
    """Plain access of `head_dim` raises, as layers have their own."""
    config = CONFIG_MAPPING["gemma4_text"]()
    assert head_sizes(config) == [256, 512]
    windows = count_layers(Fields(config))
    reach = windows[0].window
    assert reach and kv_bytes(config, 10 * reach) < kv_bytes(
        config, 10 * reach, windows=False
    )
    assert kv_bytes(config, reach) == kv_bytes(config, reach, windows=False)
