"""Features of a model's configuration beyond plain causal attention, and those that a layout does not
compute.

    config.json --uncomputed_features--> refused by name, see `model_rules`
                --required_features----> a backend that computes them

Ignoring a refused feature would change the log-probs. Imports nothing heavy: preflight uses it before
anything starts.
"""

from collections.abc import Mapping
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
INDEXED = "indexed_attention"
CHUNKED = "chunked_attention"
RECURRENT = ("linear_attention", "conv", "recurrent", "mamba", "hybrid")
"""Layers that carry a state from token to token, see `mixers`. `hybrid` ones also have attention."""
WITHOUT_CONTEXT = ("moe", "mlp")

LAYER_TYPES = {
    "packed": (FULL, SLIDING, INDEXED, *RECURRENT, *WITHOUT_CONTEXT),
    "padded": (
        FULL,
        SLIDING,
        INDEXED,
        CHUNKED,
        "hybrid_sliding",
        *RECURRENT,
        *WITHOUT_CONTEXT,
    ),
}
"""The kinds of layers that each layout computes."""

LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
SELECTED_TOKENS = "index_topk"
"""The number of earlier tokens that an indexer selects for each token, see `selected_attention`."""

COMPRESSION = ("compress_rates", "index_kpool", "indexer_budget")
"""Sizes of attention to selected blocks of tokens, which other tokens of the row change."""

OF_ROWS = ("attn_temperature_tuning", "is_encoder_decoder")
"""Features that count tokens from the start of the row, or read the whole row."""

ATTENTION_SOFTCAP = "attn_logit_softcapping"
FINAL_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
INNER_SOFTCAPS = ("router", "gate")  # applied by the model's own layers

LOGIT_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
LOGIT_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
MULTIPLIED_FAMILIES = ("hyperclovax",)
"""Model types that multiply by `logits_scaling`, by which Granite and others divide."""

# The rotary tables of these depend on the longest sequence computed at the same time: results would depend on
# the plan.
LENGTH_DEPENDENT_ROTARY = ("dynamic", "longrope")

TEXT_OF_VISION = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text")
TENSOR_PARALLEL_FAMILIES = (
    "lfm2",
    "llama",
    "mistral",
    "mixtral",
    "nemotron_h",
    "qwen2",
    "qwen3",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    *TEXT_OF_VISION,
)
"""Model types of decoders in whose layers `tensor_parallel` shares all modules with parameters."""

ROUTER_LOSS_FAMILIES = ("gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Model types whose routers choose by a softmax over all experts, and return logits, weights and choice."""

STATE_HEADS = (
    "linear_num_value_heads",
    "linear_num_heads",
    "mamba_num_heads",
    "mamba_n_heads",
)
"""Names that families give the number of heads of a layer with a state."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that families give the number of experts of a layer."""

SELECTION = "selection"
"""The feature of models with `SELECTED_TOKENS`. Packed rows compute it outside the kernels."""

KERNEL_FEATURES = {
    "packed": {
        "flash4": frozenset({"sliding_window", "sinks", SELECTION}),
        "flash3": frozenset({"sliding_window", "sinks", SELECTION}),
        "varlen": frozenset({"sliding_window", "sinks", SELECTION}),
        "flash": frozenset({"sliding_window", "softcap", SELECTION}),
        "sdpa": frozenset({"sliding_window", "softcap", "sinks", SELECTION}),
    },
    "padded": {
        "sdpa": frozenset({"sliding_window", SELECTION}),
        "eager": frozenset({"sliding_window", "softcap", "sinks", SELECTION}),
    },
}
"""Features beyond causal attention that each kernel computes, by layout, in the names of
`required_features`.
"""


IMAGES_SEE_AHEAD = ("gemma3", "gemma4", "gemma4_unified", "paligemma", "shieldgemma2")
"""Model types whose tokens of an image attend to later ones. Rows and engines are causal: they read text
alone.
"""


def uncomputed_features(features: Mapping[str, Any], layout: str = "packed") -> list[str]:
    """Return the features of a language model's configuration that `layout` does not compute.

    features: of config.json or its `text_config`, or a loaded configuration as a mapping, which may name
    more.
    """
    missing_features = [
        name for name in sorted(features) if _is_unknown_cap(name, features[name])
    ]
    missing_features += [
        f"rope_type={kind}"
        for kind in _rotary_types(features)
        if kind in LENGTH_DEPENDENT_ROTARY
    ]
    bidirectional = features.get("use_bidirectional_attention")
    # Text stays causal.
    missing_features += ["use_bidirectional_attention"] * (
        bool(bidirectional) and bidirectional != "vision"
    )
    missing_features += [name for name in COMPRESSION if features.get(name)]
    missing_features += ["keep_window_size"] * _selects_beyond_a_window(features)
    missing_features += sorted(_layer_kinds(features) - set(LAYER_TYPES[layout]))
    if layout == "packed":
        missing_features += [name for name in OF_ROWS if features.get(name)]
        has_convolution = any("conv" in name for name in features)
        missing_features += sorted(_layer_kinds(features) & set(RECURRENT)) * (
            not has_convolution
        )
    return missing_features


def unshared_states(features: Mapping[str, Any], ranks: int) -> str:
    """Return which states of a config.json so many ranks cannot share, or an empty string. 1: which prompts
    cannot hand on to their responses.
    """
    kinds = _layer_kinds(features) & set(RECURRENT)
    heads = [features[name] for name in STATE_HEADS if features.get(name)]
    # Jamba lists no kinds of layers.
    has_mamba = any(name.startswith("mamba_") for name in features)
    if (has_mamba or kinds - {"conv"}) and not heads:
        return "states that are not by heads"
    undivided = [count for count in heads if count % ranks]
    return f"states of {undivided[0]} heads, which they do not divide" if undivided else ""


def expert_count(features: Mapping[str, Any]) -> int:
    """Return the experts of a layer, each shaped as a feed-forward block, or 0 for a dense model."""
    return next((int(count) for name in EXPERT_COUNTS if (count := features.get(name))), 0)


def _layer_kinds(features: Mapping[str, Any]) -> set[str]:
    return {kind for name in LAYER_LISTS for kind in features.get(name) or ()} - {
        "attention"
    }


def features_of_file(features: Mapping[str, Any]) -> frozenset[str]:
    """Return `sliding_window`, `softcap` and `selection` if a config.json names them. The model class may
    need more.
    """
    layer_types = features.get("layer_types")
    says_window = features.get(
        "use_sliding_window", features.get("model_type") == "mistral"
    )
    windowed = (
        SLIDING in layer_types
        if layer_types
        else bool(says_window and features.get("sliding_window"))
    )
    needed = {"sliding_window": windowed, "softcap": bool(features.get(ATTENTION_SOFTCAP))}
    needed |= {SELECTION: bool(features.get(SELECTED_TOKENS))}
    return frozenset(name for name, need in needed.items() if need)


def required_features(config: Any, parameter_names: list[str]) -> frozenset[str]:
    """Return which of `sliding_window`, `softcap`, `sinks` and `selection` a model's attention layers
    need.
    """
    text = config.get_text_config()
    layers = range(text.num_hidden_layers)
    needed = {
        "sliding_window": any(expected_window(text, index) is not None for index in layers),
        "softcap": bool(getattr(text, ATTENTION_SOFTCAP, None)),
        "sinks": any(name.endswith("sinks") for name in parameter_names),
        SELECTION: bool(getattr(text, SELECTED_TOKENS, None)),
    }
    return frozenset(name for name, need in needed.items() if need)


def head_sizes(config: Any) -> frozenset[int]:
    """Return the sizes of attention heads, of each kind of layer the largest of queries and values. Empty
    without attention.
    """
    text = config.get_text_config()
    # Its layers differ, and only they may be asked.
    if getattr(text, "is_heterogeneous", False):
        sizes = [_head_sizes_of_a_layer(layer) for layer in text.per_layer_config]
        return frozenset().union(*sizes)
    return _head_sizes_of_a_layer(text)


def _head_sizes_of_a_layer(text: Any) -> frozenset[int]:
    nope = getattr(text, "qk_nope_head_dim", None)
    if nope is not None:  # latent attention, whose `head_dim` is only the rotated part
        return frozenset({max(nope + text.qk_rope_head_dim, text.v_head_dim)})
    heads = getattr(text, "num_attention_heads", None)
    size = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else None)
    if size is None:
        return frozenset()
    return frozenset({size, getattr(text, "global_head_dim", None) or size})


def expected_window(config: Any, layer_index: int) -> int | None:
    """Return the tokens that each token sees in a layer, itself included, or None for all before it."""
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if layer_types:
        return window if layer_types[layer_index] == SLIDING else None
    return window if getattr(config, "use_sliding_window", True) else None


def final_softcap(config: Any) -> float | None:
    """Return the c of an output layer whose logits are c tanh(x / c), or None."""
    text = config.get_text_config()
    return next(
        (cap for name in FINAL_SOFTCAPS if (cap := getattr(text, name, None))), None
    )


def logit_factor(config: Any) -> float:
    """Return the factor of the output layer's logits, before a soft cap, 1 for most families."""
    text = config.get_text_config()
    factor = 1.0
    for name in (*LOGIT_MULTIPLIERS, *LOGIT_DIVISORS):
        value = getattr(text, name, None)
        if value is not None:
            multiplies = name in LOGIT_MULTIPLIERS or text.model_type in MULTIPLIED_FAMILIES
            factor *= value if multiplies else 1 / value
    return factor


def _selects_beyond_a_window(features: Mapping[str, Any]) -> bool:
    # Beyond its window, Doge selects tokens by a top-k.
    window = features.get("keep_window_size")
    positions = features.get("max_position_embeddings")
    stretched = any("factor" in table for table in _rotary_tables(features))
    return bool(window) and (positions is None or stretched or window < positions)


def _is_unknown_cap(name: str, value: Any) -> bool:
    if (
        not value
        or not ("softcap" in name or "soft_cap" in name)
        or any(part in name for part in INNER_SOFTCAPS)
    ):
        return False
    return name not in (ATTENTION_SOFTCAP, *FINAL_SOFTCAPS)


def _rotary_tables(features: Mapping[str, Any]) -> list[dict[str, Any]]:
    # One table for all layers, or one for each type of layer. Older files name it rope_scaling.
    parameters = features.get("rope_parameters") or features.get("rope_scaling") or {}
    return [
        parameters,
        *(table for table in parameters.values() if isinstance(table, dict)),
    ]


def _rotary_types(features: Mapping[str, Any]) -> list[str]:
    kinds = (
        table.get("rope_type", table.get("type")) for table in _rotary_tables(features)
    )
    return sorted({kind for kind in kinds if isinstance(kind, str)})
