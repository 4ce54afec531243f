"""Every model family, in both layouts, equals one unpadded sequence at a time: log-probs, entropies and
gradients.
"""

import copy
import json
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.refusals import refused
from tests.workers.model.attention.reference_attention import REFERENCE_ATTENTION
from tests.workers.model.tiny import (
    FAMILIES,
    VOCABULARY,
    random_sequences,
    relative_error,
    tiny_config,
    unpacked_log_probs,
)
from workers.batch.dataproto import DataProto
from workers.config.roles import LoraConfig, ModelConfig
from workers.errors import UnsupportedModelError
from workers.model.attention import selected_attention
from workers.model.attention.attention import choose_backend, packed_attention
from workers.model.attention.selected_attention import find_indexers
from workers.model.checkpoint.lora import add_adapters
from workers.model.model import PackedCausalLM, packed_causal_lm
from workers.model.rows.packing import ModelInput, pack, pad
from workers.model.rules.families import (
    features_of_file,
    head_sizes,
    logit_factor,
    required_features,
    uncomputed_features,
)
from workers.model.rules.model_rules import check_layout

CPU = torch.device("cpu")
TEMPERATURE = 0.8

# transformers' eager attention of these takes its softmax in float32, and in float64 overflows in rows of
# padding.
PADDED_IN_FLOAT32 = ("gemma2",)


def random_model(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Its biases, routers and sinks are random too: transformers starts some of them at 0."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=dtype)
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped product takes no float64
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    return model


SINGLE_PRECISION = ("kv_lora_rank", "linear_key_head_dim", "mamba_num_heads")


def gradient_tolerance(name: str, model: PreTrainedModel, tolerance: float) -> float:
    """Whatever the type of the model, Gemma computes its norms in float32, and so the gradients of their
    weights.
    """
    of_gemma = model.config.model_type.startswith("gemma") and name.endswith("norm.weight")
    return max(tolerance, 1e-6) if of_gemma else tolerance


def computes_in_float32(model: PreTrainedModel) -> bool:
    """Return whether routers of DeepSeek, or states of delta nets and Mamba-2, are in float32 whatever the
    type of the model.
    """
    return any(hasattr(model.config, field) for field in SINGLE_PRECISION)


class Outcome:
    """log_probs and entropy [N] of the predicted tokens, and the gradient of a fixed weighted sum of both by
    name.
    """

    def __init__(self, log_probs: Tensor, entropy: Tensor, model: PreTrainedModel) -> None:
        self.log_probs, self.entropy, self.model = log_probs, entropy, model
        weights = torch.randn(
            2,
            len(log_probs),
            generator=torch.Generator().manual_seed(1),
            dtype=torch.float64,
        )
        (weights[0] * log_probs + weights[1] * entropy).sum().backward()
        # The weights of an expert that no token chose may have none.
        self.gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in model.named_parameters()
        }

    def assert_equals(self, expected: "Outcome", tolerance: float) -> None:
        if computes_in_float32(self.model):
            tolerance = max(tolerance, 1e-6)
        assert relative_error(self.log_probs, expected.log_probs) < tolerance
        assert relative_error(self.entropy, expected.entropy) < tolerance
        for name, gradient in self.gradients.items():
            error = relative_error(gradient, expected.gradients[name])
            assert error < gradient_tolerance(name, self.model, tolerance), name


def unpacked(model: PreTrainedModel, sequences: DataProto) -> Outcome:
    model = copy.deepcopy(model)
    if "selection" in required_features(model.config, []):
        model.set_attn_implementation("sdpa")  # tells the selected tokens by its mask
    elif model._can_set_attn_implementation():
        model.set_attn_implementation(REFERENCE_ATTENTION)
    outputs = unpacked_log_probs(model, sequences, TEMPERATURE)
    mask = sequences.tokens["loss_mask"]
    log_probs, entropy = (
        torch.cat([output[part] for output in outputs])[mask] for part in range(2)
    )
    return Outcome(log_probs, entropy, model)


def through_rows(
    module: PackedCausalLM, rows: ModelInput, attention: object = None
) -> tuple[Tensor, Tensor]:
    return module(replace(rows, attention=attention), TEMPERATURE)


def packed(model: PreTrainedModel, sequences: DataProto, multiple: int = 1) -> Outcome:
    module = packed_causal_lm(copy.deepcopy(model), ModelConfig())
    row = pack(sequences, multiple)
    backend = choose_backend("auto", CPU, torch.float64, module.required_features)
    return Outcome(
        *through_rows(module, row, attention=packed_attention(backend, row, CPU)),
        module.model,
    )


def padded(model: PreTrainedModel, sequences: DataProto, multiple: int = 1) -> Outcome:
    module = packed_causal_lm(copy.deepcopy(model), ModelConfig(layout="padded"))
    rows = pad(sequences, multiple)
    return Outcome(*through_rows(module, rows), module.model)


@pytest.mark.parametrize("family", FAMILIES)
def test_p7_m1_packed_and_padded_equal_unpacked(family):
    model, sequences = random_model(family), random_sequences()
    expected = unpacked(model, sequences)
    packed(model, sequences).assert_equals(expected, 1e-9)
    packed(model, sequences, multiple=4).assert_equals(expected, 1e-9)
    if family in PADDED_IN_FLOAT32:
        model = random_model(family, torch.float32)
        padded(model, sequences, multiple=8).assert_equals(unpacked(model, sequences), 1e-4)
    else:
        padded(model, sequences, multiple=8).assert_equals(expected, 1e-9)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_tokens_are_selected_within_each_sequence_block_by_block(family, monkeypatch):
    """Sequences of up to 33 tokens select 4 each."""
    model, sequences = random_model(family), random_sequences()
    expected = unpacked(model, sequences)
    model.config.index_topk = 64
    for indexer in find_indexers(model):
        indexer.index_topk = 64
    everything = packed(model, sequences)
    assert relative_error(everything.log_probs, expected.log_probs) > 0.01, (
        "selection changes nothing"
    )
    everything.assert_equals(unpacked(model, sequences), 1e-9)
    for indexer in find_indexers(model):
        indexer.index_topk = 4
    monkeypatch.setattr(selected_attention, "QUERY_BLOCK", 5)
    packed(model, sequences).assert_equals(expected, 1e-9)


def test_an_indexer_is_frozen_and_takes_no_adapter(caplog):
    module = packed_causal_lm(random_model("deepseek_v32"), ModelConfig())
    with caplog.at_level("INFO"):
        module.set_trained(True, train_vision=False)
    assert "its 2 indexers are frozen" in caplog.text
    frozen = {
        name for name, parameter in module.named_parameters() if not parameter.requires_grad
    }
    assert (
        frozen
        == {name for name, _ in module.named_parameters() if ".indexer." in name}
        != set()
    )
    with refused("model.lora.target_modules=wq_b"):
        add_adapters(module.model, LoraConfig(rank=2, target_modules="wq_b"))


def test_a_model_without_indexers_that_says_it_selects_is_refused():
    model = random_model("llama")
    model.config.index_topk = 4
    with refused("model.layout=padded", UnsupportedModelError):
        packed_causal_lm(model, ModelConfig())


def bloom() -> PreTrainedModel:
    """A family with its own attention code, positions by distance, and its layers under a name of its own."""
    torch.manual_seed(0)
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        n_layer=2,
        n_head=2,
        initializer_range=0.2,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def test_p1_a_model_that_cannot_pack_is_refused_by_name_and_runs_padded():
    model, sequences = bloom(), random_sequences()
    with refused("model.layout=padded", UnsupportedModelError):
        packed_causal_lm(model, ModelConfig())
    # Its softmax, too, is taken in float32.
    padded(model, sequences, multiple=8).assert_equals(unpacked(model, sequences), 1e-5)


@pytest.mark.parametrize(
    ("family", "features"),
    [
        ("qwen2", set()),
        ("gemma", set()),
        ("qwen3_moe", set()),
        ("qwen2 windowed", {"sliding_window"}),
        ("mistral windowed", {"sliding_window"}),
        ("gemma3", {"sliding_window"}),
        ("gemma2", {"sliding_window", "softcap"}),
        ("gpt_oss", {"sliding_window", "sinks"}),
        ("deepseek_v3", set()),
        ("deepseek_v32", {"selection"}),
        ("glm_moe_dsa", {"selection"}),
    ],
)
def test_what_a_family_needs_is_read_from_its_configuration(family, features):
    names = [name for name, _ in random_model(family).named_parameters()]
    assert required_features(tiny_config(family), names) == features


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (transformers.MiniMaxConfig(), "linear_attention"),
        (transformers.Llama4TextConfig(), "chunked_attention"),
        (transformers.DeepseekV4Config(), "compress_rates"),
        (
            tiny_config("gemma3", use_bidirectional_attention=True),
            "use_bidirectional_attention",
        ),
        (
            tiny_config(
                "llama",
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            ),
            "rope_type=dynamic",
        ),
    ],
)
def test_what_would_change_the_log_probs_is_refused_by_name(config, feature):
    with refused(feature, UnsupportedModelError):
        check_layout(config.get_text_config().to_dict(), "packed", "it")
    saved = json.loads(config.to_json_string())
    assert feature in uncomputed_features(saved), (
        "the driver, which has only the file, would start the run"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_needs_stands_in_its_file(family):
    config = tiny_config(family)
    saved = json.loads(config.to_json_string())
    assert uncomputed_features(saved) == []
    assert features_of_file(saved) == required_features(config, parameter_names=[])


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        (tiny_config("llama"), 1.0),
        (transformers.CohereConfig(logit_scale=0.5), 0.5),
        (transformers.GraniteConfig(logits_scaling=8.0), 1 / 8),
        (transformers.HyperCLOVAXConfig(logits_scaling=8.0), 8.0),
        (transformers.FalconH1Config(lm_head_multiplier=0.25), 0.25),
        # A property of its class.
        (transformers.MiniCPM3Config(hidden_size=640, dim_model_base=256), 0.4),
    ],
)
def test_the_factor_on_logits_is_read_from_the_configuration(config, factor):
    assert logit_factor(config) == pytest.approx(factor)


def test_a_layer_that_leaves_its_window_to_the_mask_is_refused():
    """Without the mask, which packed rows do not have, it would see everything."""
    model = random_model("mistral windowed")
    module = packed_causal_lm(model, ModelConfig())
    row = pack(random_sequences())
    model.config.layer_types = ["full_attention"] * 2
    with refused("sliding_window=4", UnsupportedModelError):
        through_rows(module, row, attention=packed_attention("sdpa", row, CPU))


@pytest.mark.parametrize(
    ("family", "feature"), [("gemma2", "softcap"), ("gpt_oss", "sinks")]
)
def test_padded_rows_do_not_go_through_a_kernel_that_leaves_something_out(family, feature):
    with refused(feature, UnsupportedModelError):
        packed_causal_lm(
            random_model(family), ModelConfig(layout="padded", attention="sdpa")
        )
    module = packed_causal_lm(random_model(family), ModelConfig(layout="padded"))
    assert module.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kernel", ["varlen", "flash3", "flash"])
def test_d8_flash_kernels_read_padded_rows_as_segments(kernel):
    module = packed_causal_lm(
        random_model("llama"), ModelConfig(layout="padded", attention=kernel)
    )
    assert module.model.config._attn_implementation == "ballast_packed"


def test_an_attention_of_the_other_layout_is_refused():
    with refused("model.attention=eager"):
        choose_backend("eager", CPU, torch.float32)
    with refused("model.attention=sdpa", UnsupportedModelError):
        packed_causal_lm(bloom(), ModelConfig(layout="padded", attention="sdpa"))


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma3"])
def test_packed_in_bfloat16_is_as_near_to_the_exact_log_probs_as_unpacked(family):
    model, sequences = random_model(family), random_sequences()
    exact = unpacked(model, sequences).log_probs
    narrow = copy.deepcopy(model).bfloat16()
    noise = (unpacked(narrow, sequences).log_probs - exact).abs().mean()
    assert noise > 1e-3
    assert (packed(narrow, sequences).log_probs - exact).abs().mean() < 1.1 * noise


def test_sizes_of_heads_are_read_where_layers_differ() -> None:
    """Plain access of `head_dim` raises for Gemma 4, whose layers have their own."""
    assert head_sizes(transformers.CONFIG_MAPPING["gemma4_text"]()) == {256, 512}
