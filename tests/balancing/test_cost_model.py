"""The cost model: FLOPs counted by hand, config forms, refusals."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

from balancing import BalancingError, CostModel
from balancing.basics.windows import Window
from balancing.cost_model import SEVEN_BILLION
from balancing.errors import CostModelError, LengthError, OptionError
from tests.balancing.published_models import DEEPSEEK_V3, MIXTRAL, QWEN3_30B_A3B

DENSE = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
}


def test_workload_is_linear_plus_quadratic():
    workload = CostModel(3.0, 0.5).workload([1, 2, 10])
    assert workload.dtype == np.float64
    assert workload.tolist() == [3.5, 8.0, 80.0]


def test_tokens_counts_tokens():
    assert CostModel.tokens().workload([4, 7]).tolist() == [4.0, 7.0]


def test_grouped_query_model_counted_by_hand():
    # heads are 2 wide: q 8x8, k and v 8x4 each, o 8x8; three matrices of 8x16; head 8x10.
    weights = 2 * (64 + 32 + 32 + 64 + 3 * 128) + 80
    # scores and weighted sum: 2 * 2 * L^2 * 8 FLOPs over all pairs, half of them causal.
    model = CostModel.from_model_config(DENSE, training=False)
    assert model == CostModel(2.0 * weights, 2 * 2.0 * 8)


def test_training_costs_three_forwards():
    forward = CostModel.from_model_config(DENSE, training=False)
    assert CostModel.from_model_config(DENSE) == CostModel(
        3 * forward.linear, 3 * forward.quadratic
    )


def test_object_and_nested_config_equal_the_mapping():
    expected = CostModel.from_model_config(DENSE)
    assert CostModel.from_model_config(SimpleNamespace(**DENSE)) == expected
    assert CostModel.from_model_config({"text_config": DENSE}) == expected


def test_only_active_experts_count():
    sparse = {
        **DENSE,
        "num_experts": 64,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
    }
    dense, mixed = (CostModel.from_model_config(c, training=False) for c in (DENSE, sparse))
    difference = 2 * (3 * 8 * 16 - (3 * 8 * 4 * 2 + 8 * 64))
    assert dense.linear - mixed.linear == 2.0 * difference
    assert dense.quadratic == mixed.quadratic


def test_latent_attention_counts_its_own_widths():
    latent = {
        **DENSE,
        "kv_lora_rank": 3,
        "qk_rope_head_dim": 1,
        "qk_nope_head_dim": 2,
        "v_head_dim": 5,
    }
    model = CostModel.from_model_config(latent, training=False)
    attention = 8 * 12 + 8 * (3 + 1) + 3 * 4 * (2 + 5) + 4 * 5 * 8
    assert model == CostModel(2.0 * (2 * (attention + 3 * 128) + 80), 2.0 * (12 + 20))


@pytest.mark.parametrize(
    ("config", "billions"),
    [(DEEPSEEK_V3, 37.0), (QWEN3_30B_A3B, 3.3), (MIXTRAL, 12.9), (SEVEN_BILLION, 7.6)],
    ids=["DeepSeek-V3", "Qwen3-30B-A3B", "Mixtral-8x7B", "Qwen2-7B"],
)
def test_two_flops_for_each_active_weight_that_the_makers_publish(config, billions):
    # Published counts of active weights include the embedding table, which is looked up and costs nothing.
    embedding = config["hidden_size"] * config["vocab_size"]
    linear = CostModel.from_model_config(config, training=False).linear
    assert linear / 2 + embedding == pytest.approx(billions * 1e9, rel=0.025)


@pytest.mark.parametrize(
    ("change", "sparse_layers"),
    [
        ({"mlp_only_layers": [0, 5]}, 46),
        ({"decoder_sparse_step": 2}, 24),
        ({"first_k_dense_replace": 3}, 45),
        ({"moe_layer_freq": 4}, 12),
    ],
)
def test_layers_that_a_config_leaves_dense_are_counted_dense(change, sparse_layers):
    all_sparse, some = (
        CostModel.from_model_config(c, training=False)
        for c in (QWEN3_30B_A3B, {**QWEN3_30B_A3B, **change})
    )
    dense_instead = 3 * 2048 * 6144 - (3 * 2048 * 768 * 8 + 2048 * 128)
    assert some.linear - all_sparse.linear == 2.0 * (48 - sparse_layers) * dense_instead


def test_a_unit_is_kept_and_checked():
    assert CostModel.tokens().scaled(2.0) == CostModel(2.0, 0.0, "token")
    assert CostModel.from_model_config(DENSE).unit == "FLOP"
    with pytest.raises(OptionError, match="unit='hour'"):
        CostModel(1.0, 1.0, "hour")


@pytest.mark.parametrize(
    "coefficients", [(-1, 1), (1, float("nan")), (0, 0), (float("inf"), 1)]
)
def test_bad_coefficients_are_refused(coefficients):
    with pytest.raises(CostModelError, match="CostModel"):
        CostModel(*coefficients)


def test_missing_key_and_bad_length_are_named():
    with pytest.raises(CostModelError, match="num_hidden_layers"):
        CostModel.from_model_config({"hidden_size": 8})
    with pytest.raises(LengthError, match=r"lengths\[1\] is -1"):
        CostModel.tokens().workload([1, -1])
    assert issubclass(CostModelError, BalancingError)


GPT_2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "vocab_size": 50257,
}


def test_the_names_of_gpt_2s_file_are_read() -> None:
    """Two FLOPs for each of its matrices' weights, positions apart."""
    cost = CostModel.from_model_config(GPT_2, training=False)
    assert (cost.linear, cost.quadratic) == (
        2 * (12 * 12 * 768**2 + 768 * 50257),
        2 * 12 * 768,
    )


def test_active_experts_are_read_under_kimis_name() -> None:
    names = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 99,
    }
    names |= {"num_experts": 8, "moe_intermediate_size": 32}
    kimi, others = (
        names | {name: 3} for name in ("num_experts_per_token", "num_experts_per_tok")
    )
    assert CostModel.from_model_config(kimi) == CostModel.from_model_config(others)


def test_a_window_s_attention_grows_linearly_beyond_it() -> None:
    mixed = DENSE | {
        "sliding_window": 100,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    full, windowed = (
        CostModel.from_model_config(config, training=False) for config in (DENSE, mixed)
    )
    assert windowed.windows == (Window(100, 0.5),)
    assert (windowed.linear, windowed.quadratic) == (full.linear, full.quadratic)
    lengths = np.array([50, 100, 1000])
    saved = full.workload(lengths) - windowed.workload(lengths)
    np.testing.assert_allclose(saved, full.quadratic / 2 * np.array([0, 0, 900**2]))


def test_a_record_of_a_cost_model_makes_the_same_one() -> None:
    cost = CostModel(3.0, 0.5, windows=(Window(8, 0.25, chunked=True),))
    assert CostModel(**json.loads(json.dumps(asdict(cost)))) == cost
    assert cost.scaled(2.0).windows == cost.windows
