"""The cost model: FLOPs counted by hand, config forms, refusals."""

from types import SimpleNamespace

import numpy as np
import pytest

from balancing import BalancingError, CostModel
from balancing.errors import CostModelError, LengthError

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
    assert CostModel.from_model_config(DENSE) == CostModel(3 * forward.linear, 3 * forward.quadratic)


def test_object_and_nested_config_equal_the_mapping():
    expected = CostModel.from_model_config(DENSE)
    assert CostModel.from_model_config(SimpleNamespace(**DENSE)) == expected
    assert CostModel.from_model_config({"text_config": DENSE}) == expected


def test_only_active_experts_count():
    sparse = {**DENSE, "num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    dense, mixed = (CostModel.from_model_config(c, training=False) for c in (DENSE, sparse))
    difference = 2 * (3 * 8 * 16 - (3 * 8 * 4 * 2 + 8 * 64))
    assert dense.linear - mixed.linear == 2.0 * difference
    assert dense.quadratic == mixed.quadratic


def test_latent_attention_counts_its_own_widths():
    latent = {**DENSE, "kv_lora_rank": 3, "qk_rope_head_dim": 1, "qk_nope_head_dim": 2, "v_head_dim": 5}
    model = CostModel.from_model_config(latent, training=False)
    attention = 8 * 12 + 8 * (3 + 1) + 3 * 4 * (2 + 5) + 4 * 5 * 8
    assert model == CostModel(2.0 * (2 * (attention + 3 * 128) + 80), 2.0 * (12 + 20))


@pytest.mark.parametrize("coefficients", [(-1, 1), (1, float("nan")), (0, 0), (float("inf"), 1)])
def test_bad_coefficients_are_refused(coefficients):
    with pytest.raises(CostModelError, match="CostModel"):
        CostModel(*coefficients)


def test_missing_key_and_bad_length_are_named():
    with pytest.raises(CostModelError, match="num_hidden_layers"):
        CostModel.from_model_config({"hidden_size": 8})
    with pytest.raises(LengthError, match=r"lengths\[1\] is -1"):
        CostModel.tokens().workload([1, -1])
    assert issubclass(CostModelError, BalancingError)
