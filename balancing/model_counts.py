"""Count the weights of a language model's layers from its config.

Fields --count_layers--> LayerCounts of each layer --forward_flops--> FLOPs per token and per squared token
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from balancing.model_fields import Fields

UNGATED_MODELS = frozenset(
    (
        *(
            "apertus",
            "arcee",
            "bert-generation",
            "biogpt",
            "bloom",
            "codegen",
            "ctrl",
            "falcon",
            "fuyu",
            "gpt2",
        ),
        *(
            "gpt_bigcode",
            "gpt_neo",
            "gpt_neox",
            "gpt_neox_japanese",
            "gptj",
            "jais2",
            "mpt",
            "nanochat",
            "nemotron",
        ),
        *("nemotron_h", "openai-gpt", "opt", "persimmon", "phi", "starcoder2", "xglm", "xlm"),
    )
)
"""Model types whose feed-forward block has two matrices. All others have three (gated)."""
WIDE_MODELS = frozenset({"bloom", "falcon", "gpt_neo", "gpt_neox_japanese", "mpt", "xlm"})
"""Model types whose feed-forward block has four times the hidden size where the config does not say."""
STATE_MODELS = frozenset({"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"})
"""Model types without attention. Their layers are counted as one feed-forward block of the state's width."""
STATES = frozenset({"linear_attention", "mamba", "conv", "recurrent"})
"""Layers that carry a state instead of attending."""


@dataclass(frozen=True)
class LayerCounts:
    """Counts of one layer.

    weights: that a token's products read. squared: FLOPs per squared token, causal. kv: numbers that a token
    keeps in an engine. exchanged, exchanged_in_ring: numbers of a token that context-parallel ranks send.
    expert: weights of one expert, or 0.
    """

    weights: int
    squared: int = 0
    kv: int = 0
    exchanged: int = 0
    exchanged_in_ring: int = 0
    expert: int = 0


def forward_flops(config: Mapping[str, Any] | object) -> tuple[float, float]:
    """Count a forward pass's FLOPs per token and per squared token. Raises CostModelError for a
    missing key.
    """
    fields = Fields(config)
    layers = count_layers(fields)
    weights = sum(layer.weights for layer in layers) + fields.integer("hidden_size") * fields.integer(
        "vocab_size"
    )
    return 2.0 * weights, float(sum(layer.squared for layer in layers))


def count_layers(fields: Fields) -> list[LayerCounts]:
    """Count every layer. Raises CostModelError for a missing key."""
    types = fields.layer_types()
    one_block = (
        fields.get("model_type") == "nemotron_h"
    )  # a layer is a state, attention, or a feed-forward block
    layers = len(types) if one_block and types else fields.integer("num_hidden_layers")
    types = types if len(types) == layers else [""] * layers
    sharing = layers - fields.integer(
        "num_kv_shared_layers", default=0
    )  # from here on, layers have no keys and values
    counts = []
    for layer, kind in enumerate(types):
        layer_fields = fields.of_layer(layer, layers, kind)
        mixer = LayerCounts(0)
        if not one_block or kind not in ("mlp", "moe"):
            mixer = _mixer(layer_fields, kind, shares=layer >= sharing)
        weights, expert = 0, 0
        if not one_block or kind in ("mlp", "moe"):
            weights, expert = _feed_forward(layer_fields, layer, kind, shares=layer >= sharing)
        weights += (
            3
            * layer_fields.integer("hidden_size")
            * layer_fields.integer("hidden_size_per_layer_input", default=0)
        )
        counts.append(
            LayerCounts(
                mixer.weights + weights,
                mixer.squared,
                mixer.kv,
                mixer.exchanged,
                mixer.exchanged_in_ring,
                expert,
            )
        )
    return counts


def _mixer(fields: Fields, kind: str, *, shares: bool) -> LayerCounts:
    """Count attention, or what stands in its place."""
    if fields.get("model_type") in STATE_MODELS:
        return LayerCounts(0)
    if kind in STATES:
        return LayerCounts(_state_weights(fields, kind))
    if fields.get("kv_lora_rank") is not None:
        return _latent_attention(fields)
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    head = fields.integer("head_dim", default=hidden // heads)
    kv_heads = key_value_heads(fields, heads)
    projections = 0 if shares else 1 if kind == "full_attention" and fields.get("attention_k_eq_v") else 2
    # Scores and weighted sums take 2 * L**2 * width FLOPs each. The causal half is L**2 * width.
    return LayerCounts(
        weights=hidden * head * (2 * heads + projections * kv_heads),
        squared=2 * heads * head,
        kv=0 if shares else 2 * kv_heads * head,
        exchanged=2 * (heads + kv_heads) * head,
        exchanged_in_ring=2 * kv_heads * head,
    )


def key_value_heads(fields: Fields, heads: int) -> int:
    """Return the heads of keys and values."""
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):  # Falcon-7B, StarCoder
        return 1
    return fields.integer("num_key_value_heads", default=heads)


def _latent_attention(fields: Fields) -> LayerCounts:
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    rope = fields.integer("qk_rope_head_dim")
    nope = fields.integer("qk_nope_head_dim")
    value = fields.integer("v_head_dim")
    kv_rank = fields.integer("kv_lora_rank")
    query_rank = fields.integer("q_lora_rank", default=0)
    query = heads * (rope + nope)
    query_weights = query_rank * (hidden + query) if query_rank else hidden * query
    kv_weights = hidden * (kv_rank + rope) + kv_rank * heads * (nope + value)
    width = query + heads * value
    return LayerCounts(
        weights=query_weights + kv_weights + heads * value * hidden,
        squared=width,
        kv=kv_rank + rope,
        exchanged=2 * width,
        exchanged_in_ring=width,
    )


def _state_weights(fields: Fields, kind: str) -> int:
    """Count the projections of a layer with a state: Mamba-2, gated delta net, short convolution, or four
    squares.
    """
    hidden = fields.integer("hidden_size")
    heads = fields.integer("mamba_num_heads", "mamba_n_heads", default=0)
    if heads:
        inner = heads * fields.integer("mamba_head_dim", "mamba_d_head")
        states = fields.integer("n_groups", "mamba_n_groups") * fields.integer(
            "ssm_state_size", "mamba_d_state"
        )
        return hidden * (3 * inner + 2 * states + heads)
    heads = fields.integer("linear_num_value_heads", default=0)
    if heads:
        keys = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim")
        values = heads * fields.integer("linear_value_head_dim")
        return hidden * (2 * keys + 3 * values + 2 * heads)
    return 4 * hidden**2


def _feed_forward(fields: Fields, layer: int, kind: str, *, shares: bool) -> tuple[int, int]:
    """Return the weights that a token's products read, and those of one expert."""
    hidden = fields.integer("hidden_size")
    experts = fields.integer("num_experts", default=0)
    sparse = kind == "moe" or (kind != "mlp" and bool(experts) and is_sparse(fields, layer))
    weights, expert = 0, 0
    if not sparse or fields.get("enable_moe_block"):  # Gemma 4 has both
        inner = _inner_width(fields) * (2 if shares and fields.get("use_double_wide_mlp") else 1)
        weights += matrices(fields) * hidden * inner
    if sparse:
        width = fields.integer("moe_intermediate_size", "intermediate_size")
        # Nemotron's experts may work on a smaller width than the layers.
        latent = fields.integer("moe_latent_size", default=0)
        expert = matrices(fields) * (latent or hidden) * width
        weights += fields.integer("num_experts_per_tok") * expert + hidden * experts + 2 * hidden * latent
        weights += matrices(fields) * hidden * _shared_width(fields, width)
    return weights, expert


def _shared_width(fields: Fields, width: int) -> int:
    """Return the width of all experts that every token uses: one of its own width, or several as wide as the
    others.
    """
    explicit_width = fields.integer("shared_expert_intermediate_size", default=0)
    return explicit_width or fields.integer("n_shared_experts", default=0) * width


def _inner_width(fields: Fields) -> int:
    hidden = fields.integer("hidden_size")
    if fields.get("model_type") in STATE_MODELS:
        return fields.integer("intermediate_size", default=hidden * fields.integer("expand", default=2))
    wide = (
        fields.get("model_type") in WIDE_MODELS or fields.get("n_embd") is not None
    )  # GPT-2's `n_inner` is null
    return fields.integer("intermediate_size", default=4 * hidden if wide else None)


def matrices(fields: Fields) -> int:
    """Return the matrices of a feed-forward block."""
    return 2 if fields.get("model_type") in UNGATED_MODELS else 3


def is_sparse(fields: Fields, layer: int) -> bool:
    """Return whether a layer has experts."""
    first = fields.integer("first_k_dense_replace", default=0)
    frequency = fields.integer("moe_layer_freq", default=1)
    dense = fields.get("mlp_only_layers") or []
    step = fields.integer("decoder_sparse_step", default=1)
    return layer >= first and layer not in dense and (layer + 1) % step == 0 and layer % frequency == 0
