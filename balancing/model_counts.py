"""Count a language model's layers from its config, each by its kind.

Fields, layer_kinds --count_layers--> LayerCounts of each layer: FLOPs, keys and values, state
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from balancing.basics.windows import Window
from balancing.errors import CostModelError
from balancing.layer_kinds import (
    BLOCKS,
    CHUNKED,
    FULL,
    HYBRID,
    SLIDING,
    STATE_MODELS,
    STATES,
    layer_kinds,
)
from balancing.model_fields import Fields
from balancing.state_counts import StateCounts, count_state

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
        *(
            "nemotron_h",
            "openai-gpt",
            "opt",
            "persimmon",
            "phi",
            "starcoder2",
            "xglm",
            "xlm",
        ),
    )
)
"""Model types whose feed-forward block has two matrices. All others have three (gated)."""
WIDE_MODELS = frozenset({"bloom", "falcon", "gpt_neo", "gpt_neox_japanese", "mpt", "xlm"})
"""Model types whose feed-forward block has four times the hidden size where the config does not say."""
GATED_ATTENTION = frozenset(
    {
        "afmoe",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
    }
)
"""Model types whose attention has a gate as wide as its queries."""
SHARED_WIDTH_MODELS = frozenset({"llama4", "llama4_text"})
"""Model types in which one expert that every token uses is as wide as the others, without a field for it."""


@dataclass(frozen=True)
class LayerCounts:
    """Counts of one layer.

    kind: see `layer_kinds`. weights: that a token's products read, of them state_weights in the module with a
    state. products: multiplications of a token with the layer's state. squared: FLOPs per squared token,
    causal, if the layer sees all. window: tokens that it looks back, 0 for all. head: size of an attention
    head, 0 without one or with latent attention. kv, state: numbers that an engine keeps of a token, and of a
    sequence. exchanged, exchanged_in_ring: numbers of a token that context-parallel ranks send. expert:
    weights of one expert, or 0.
    """

    kind: str
    weights: float
    products: int = 0
    squared: int = 0
    window: int = 0
    head: int = 0
    kv: int = 0
    state: int = 0
    state_weights: float = 0
    exchanged: int = 0
    exchanged_in_ring: int = 0
    expert: float = 0


def forward_flops(config: Mapping[str, Any] | object) -> tuple[float, float]:
    """Count a forward pass's FLOPs per token and per squared token, as if all layers saw all tokens.

    Raises CostModelError for a missing key.
    """
    fields = Fields(config)
    layers = count_layers(fields)
    head = fields.integer("hidden_size") * fields.integer("vocab_size")
    products = sum(layer.weights + layer.products for layer in layers) + head
    return 2.0 * products, float(sum(layer.squared for layer in layers))


def attention_windows(layers: Iterable[LayerCounts]) -> tuple[Window, ...]:
    """Return the windows of a model's layers, with their shares in its attention."""
    layers = list(layers)
    whole = sum(layer.squared for layer in layers)
    squared: dict[tuple[int, bool], int] = {}
    for layer in layers:
        if layer.window and layer.squared:
            key = layer.window, layer.kind == CHUNKED
            squared[key] = squared.get(key, 0) + layer.squared
    return tuple(
        Window(tokens, total / whole, chunked)
        for (tokens, chunked), total in squared.items()
    )


def model_windows(config: Mapping[str, Any] | object) -> tuple[Window, ...]:
    """Return the windows of a model's layers, or none if its config lacks a size."""
    try:
        return attention_windows(count_layers(Fields(config)))
    except CostModelError:
        return ()


def count_layers(fields: Fields) -> list[LayerCounts]:
    """Count every layer. Raises CostModelError for a missing key.

    A field `counted_layers`, [weights, weights of one expert] by layer, replaces the formula's weights.
    """
    kinds = layer_kinds(fields)
    # Later layers than `sharing` have no keys and values of their own.
    sharing = len(kinds) - fields.integer("num_kv_shared_layers", default=0)
    counted = fields.get("counted_layers")
    layers = []
    for layer, kind in enumerate(kinds):
        layer_fields = fields.of_layer(layer, len(kinds), kind)
        counts = _mix(layer_fields, kind, layer >= sharing, needed=counted is None)
        if counted:
            weights, expert = counted[layer]
        else:
            weights, expert = _feed_forward(layer_fields, layer, kind, layer >= sharing)
            weights += counts.weights
        layers.append(replace(counts, weights=weights, expert=expert))
    return layers


def _mix(fields: Fields, kind: str, shares: bool, *, needed: bool) -> LayerCounts:
    """Count attention, a state, or both. needed: whether a state without a formula is an error."""
    state = StateCounts()
    if kind in STATES or kind == HYBRID:
        with nullcontext() if needed else suppress(CostModelError):
            state = count_state(fields, kind)
    attention = LayerCounts(kind, 0)
    if kind not in STATES and kind not in BLOCKS:
        attention = _attention(fields, kind, shares)
    return replace(
        attention,
        weights=attention.weights + state.weights,
        products=state.products,
        state=state.state,
        state_weights=state.weights,
        window=_window(fields, kind),
    )


def _window(fields: Fields, kind: str) -> int:
    if kind == SLIDING:
        return fields.integer("sliding_window", "sliding_window_size", default=0)
    return fields.integer("attention_chunk_size", default=0) if kind == CHUNKED else 0


def _attention(fields: Fields, kind: str, shares: bool) -> LayerCounts:
    if fields.get("kv_lora_rank") is not None:
        return _latent_attention(fields, kind)
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    head = fields.integer("head_dim", default=hidden // heads)
    value = fields.integer("v_head_dim", default=head)
    kv_heads = key_value_heads(fields, heads)
    keys, values = kv_heads * head, kv_heads * value
    if kind == FULL and fields.get("attention_k_eq_v"):
        values = 0
    gated = fields.get("attn_output_gate") or fields.get("model_type") in GATED_ATTENTION
    queries = heads * head * (2 if gated else 1)
    # Scores and weighted sums take 2 * L**2 * width FLOPs each. The causal half is L**2 * width.
    return LayerCounts(
        kind,
        weights=hidden * (queries + heads * value + (0 if shares else keys + values)),
        squared=heads * (head + value),
        head=head,
        kv=0 if shares else kv_heads * (head + value),
        exchanged=(heads + kv_heads) * (head + value),
        exchanged_in_ring=kv_heads * (head + value),
    )


def key_value_heads(fields: Fields, heads: int) -> int:
    """Return the heads of keys and values."""
    # Falcon-7B, StarCoder.
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1
    return fields.integer("num_key_value_heads", default=heads)


def _latent_attention(fields: Fields, kind: str) -> LayerCounts:
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
        kind,
        weights=query_weights + kv_weights + heads * value * hidden,
        squared=width,
        kv=kv_rank + rope,
        exchanged=2 * width,
        exchanged_in_ring=width,
    )


def _feed_forward(fields: Fields, layer: int, kind: str, shares: bool) -> tuple[int, int]:
    """Return the weights that a token's products read, and those of one expert."""
    family = fields.get("model_type")
    if family in STATE_MODELS or (family == "nemotron_h" and kind not in BLOCKS):
        return 0, 0
    hidden = fields.integer("hidden_size")
    experts = fields.integer("num_experts", default=0)
    sparse = kind == "moe" or (kind != "mlp" and bool(experts) and is_sparse(fields, layer))
    weights = 3 * hidden * fields.integer("hidden_size_per_layer_input", default=0)
    expert = 0
    if not sparse or fields.get("enable_moe_block"):  # Gemma 4 has both
        inner = _inner_width(fields, dense=bool(experts))
        inner *= 2 if shares and fields.get("use_double_wide_mlp") else 1
        weights += matrices(fields) * hidden * inner
    if sparse:
        width = fields.integer("moe_intermediate_size", "intermediate_size")
        # Nemotron's experts may work on a smaller width than the layers.
        latent = fields.integer("moe_latent_size", default=0)
        expert = matrices(fields) * (latent or hidden) * width
        weights += (
            fields.integer("num_experts_per_tok") * expert
            + hidden * experts
            + 2 * hidden * latent
        )
        weights += matrices(fields) * hidden * _shared_width(fields, width)
    return weights, expert


def _shared_width(fields: Fields, width: int) -> int:
    """Return the width of all experts that every token uses: one of its own width, or several as wide as the
    others.
    """
    explicit_width = fields.integer(
        "shared_expert_intermediate_size", "shared_intermediate_size", default=0
    )
    if explicit_width:
        return explicit_width
    if fields.get("model_type") in SHARED_WIDTH_MODELS:
        return width
    return fields.integer("n_shared_experts", default=0) * width


def _inner_width(fields: Fields, *, dense: bool) -> int:
    """dense: the block stands between blocks with experts."""
    hidden = fields.integer("hidden_size")
    if fields.get("block_auto_adjust_ff_dim"):
        return _adjusted_width(fields)
    explicit_width = fields.integer(
        "intermediate_size_mlp", "dense_intermediate_size", default=0
    )
    if dense and explicit_width:
        return explicit_width
    shared_width = fields.integer("shared_intermediate_size", default=0)
    if shared_width:  # Granite's hybrids without experts
        return shared_width
    # GPT-2's `n_inner` is null.
    wide = fields.get("model_type") in WIDE_MODELS or fields.get("n_embd") is not None
    return fields.integer("intermediate_size", default=4 * hidden if wide else None)


def _adjusted_width(fields: Fields) -> int:
    """Return LFM2's width: two thirds of what its config says, rounded up."""
    width = 2 * fields.integer("block_ff_dim", "intermediate_size") // 3
    width = int((fields.get("block_ffn_dim_multiplier") or 1.0) * width)
    multiple = fields.integer("block_multiple_of", default=1)
    return -(-width // multiple) * multiple


def matrices(fields: Fields) -> int:
    """Return the matrices of a feed-forward block."""
    return 2 if fields.get("model_type") in UNGATED_MODELS else 3


def is_sparse(fields: Fields, layer: int) -> bool:
    """Return whether a layer has experts."""
    listed = fields.get("mlp_layer_types")
    if listed is not None:
        return bool(listed == "sparse")
    sparse_layers = fields.get("moe_layers")
    if sparse_layers is not None:
        return layer in sparse_layers
    period = fields.integer("expert_layer_period", default=1)
    if layer % period != fields.integer("expert_layer_offset", default=0) % period:
        return False
    first = fields.integer(
        "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", default=0
    )
    last = fields.integer("moe_layer_end_index", default=-1)
    frequency = fields.integer("moe_layer_freq", default=1)
    dense = fields.get("mlp_only_layers") or []
    step = fields.integer(
        "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1
    )
    within = layer >= first and (last < 0 or layer <= last)
    return (
        within and layer not in dense and (layer + 1) % step == 0 and layer % frequency == 0
    )
