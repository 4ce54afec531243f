"""Models of the tests."""

from balancing.cost_model import SEVEN_BILLION
from balancing.time_model import ModelShape

SHAPE = ModelShape.from_model_config(SEVEN_BILLION)
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
