"""FLOPs of a forward pass, counted from a Hugging Face model config.

config --> weights that a token passes through, over all layers and the output head --> 2 FLOPs each, per token
       --> widths of attention scores and weighted sums                              --> FLOPs per squared token
"""

from collections.abc import Mapping
from typing import Any

from balancing.errors import CostModelError

UNGATED_MODELS = frozenset({"gpt_neox", "phi", "starcoder2", "nemotron", "opt", "gptj", "falcon"})
"""Model types whose feed-forward block has two matrices; all others count as gated, with three."""

SEVEN_BILLION = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
"""The shape of a dense grouped-query model of 7.6 billion weights (Qwen2.5-7B); the default of the command."""


def forward_flops(config: Mapping[str, Any] | object) -> tuple[float, float]:
    """FLOPs per token and per squared token of one forward pass; CostModelError that names a missing key."""
    fields = _Fields(config)
    layers = fields.integer("num_hidden_layers")
    weights_attention, width_attention = _attention(fields)
    weights = layers * weights_attention + _feed_forward_weights(fields, layers)
    weights += fields.integer("hidden_size") * fields.integer("vocab_size")
    return 2.0 * weights, float(layers * width_attention)


class _Fields:
    """Reads a config, a mapping or an object; the text part of a multi-modal one."""

    def __init__(self, config: Mapping[str, Any] | object) -> None:
        self._config = config
        nested = self.get("text_config")
        if nested is not None:
            self._config = nested

    def get(self, *names: str) -> Any:
        """The value of the first of `names` that is set and not None, else None."""
        for name in names:
            config = self._config
            value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
            if value is not None:
                return value
        return None

    def integer(self, *names: str, default: int | None = None) -> int:
        value = self.get(*names)
        if value is None and default is None:
            raise CostModelError(f"the model config has no {' or '.join(names)}; give CostModel(linear, quadratic)")
        return int(default if value is None else value)  # type: ignore[arg-type]


def _attention(fields: _Fields) -> tuple[int, int]:
    """Weights of one layer's projections, and its FLOPs per squared token.

    Scores and weighted sums take 2 * L**2 * width FLOPs each over all pairs; half of that, causal, is L**2 * width.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if fields.get("kv_lora_rank") is not None:
        return _latent_attention(fields, hidden, heads)
    head = fields.integer("head_dim", default=hidden // heads)
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    return 2 * hidden * head * (heads + kv_heads), 2 * heads * head


def _latent_attention(fields: _Fields, hidden: int, heads: int) -> tuple[int, int]:
    """Multi-head latent attention (DeepSeek-V2, 2024): low-rank keys, values and optionally queries."""
    rope, nope = fields.integer("qk_rope_head_dim"), fields.integer("qk_nope_head_dim")
    value, kv_rank = fields.integer("v_head_dim"), fields.integer("kv_lora_rank")
    query_rank = fields.integer("q_lora_rank", default=0)
    query = heads * (rope + nope)
    query_weights = query_rank * (hidden + query) if query_rank else hidden * query
    kv_weights = hidden * (kv_rank + rope) + kv_rank * heads * (nope + value)
    return query_weights + kv_weights + heads * value * hidden, query + heads * value


def _feed_forward_weights(fields: _Fields, layers: int) -> int:
    """Weights that a token passes through in the feed-forward blocks of all layers."""
    hidden = fields.integer("hidden_size")
    matrices = 2 if fields.get("model_type") in UNGATED_MODELS else 3
    experts = fields.integer("num_experts", "n_routed_experts", "num_local_experts", default=0)
    sparse_layers = _sparse_layers(fields, layers) if experts else 0
    weights = 0
    if sparse_layers < layers:
        weights += (layers - sparse_layers) * matrices * hidden * fields.integer("intermediate_size")
    if sparse_layers:
        active = fields.integer("num_experts_per_tok", "moe_topk")
        width = fields.integer("moe_intermediate_size", "intermediate_size")
        shared = fields.integer("n_shared_experts", default=0) * width
        shared += fields.integer("shared_expert_intermediate_size", default=0)
        weights += sparse_layers * hidden * (matrices * (active * width + shared) + experts)
    return weights


def _sparse_layers(fields: _Fields, layers: int) -> int:
    """The number of layers with a mixture of experts, by the config keys of DeepSeek and Qwen."""
    first = fields.integer("first_k_dense_replace", default=0)
    frequency = fields.integer("moe_layer_freq", default=1)
    dense = set(fields.get("mlp_only_layers") or [])
    step = fields.integer("decoder_sparse_step", default=1)
    return sum(
        1 for layer in range(first, layers) if layer not in dense and (layer + 1) % step == 0 and layer % frequency == 0
    )
