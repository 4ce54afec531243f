"""Name the kind of each layer, which config.json of different families says in different ways.

layer_types, letters of a pattern --------------------+
numbers of the layers with attention, every n-th one  +--layer_kinds--> a kind for each layer
sliding_window, attention_chunk_size, the family -----+
"""

from balancing.model_fields import Fields

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, MAMBA, CONV = "linear_attention", "mamba", "conv"
HYBRID = "hybrid"
"""Attention and a state, side by side."""
STATES = frozenset({LINEAR, MAMBA, CONV, "recurrent"})
"""Layers that carry a state instead of attending."""
BLOCKS = frozenset({"mlp", "moe"})
"""Feed-forward blocks that are layers of their own (Nemotron-H)."""

OTHER_WORDS = {"attention": FULL, "hybrid_sliding": SLIDING}
PATTERN_LETTERS = {"M": MAMBA, "*": FULL, "-": "mlp", "E": "moe", "L": SLIDING, "G": FULL}
"""Letters of Nemotron-H's `hybrid_override_pattern` and EXAONE's `sliding_window_pattern`."""
WINDOW_PATTERNS = {
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gpt_oss": 2,
}
"""Every n-th layer sees all tokens, where config.json says neither this nor `layer_types`."""
STATE_MODELS = frozenset({"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"})
"""Model types without attention. A layer is one block."""


def layer_kinds(fields: Fields) -> list[str]:
    """Return the kind of each layer. Raises CostModelError without a number of layers."""
    listed = fields.get("layer_types") or []
    kinds = [PATTERN_LETTERS.get(word, OTHER_WORDS.get(word, word)) for word in listed]
    if kinds and fields.get("model_type") == "nemotron_h":
        return kinds
    layers = fields.integer("num_hidden_layers")
    if len(kinds) == layers:
        return kinds
    return [_kind(fields, layer) for layer in range(layers)]


def _kind(fields: Fields, layer: int) -> str:
    family = fields.get("model_type")
    if family in STATE_MODELS:
        return MAMBA
    if family == "falcon_h1":
        return HYBRID
    kda_layers = fields.part("linear_attn_config").get("kda_layers")  # Kimi counts from 1
    if kda_layers is not None:
        return LINEAR if layer + 1 in kda_layers else FULL
    attending = fields.get("attn_layer_indices", "full_attn_idxs")
    if attending is None and family == "bamba":
        return MAMBA
    if attending is not None:
        other = MAMBA if fields.get("mamba_expand") else CONV
        return FULL if layer in attending else other
    period = fields.integer("attn_layer_period", default=0)
    if period:
        return FULL if layer % period == fields.integer("attn_layer_offset") else MAMBA
    interval = fields.integer("full_attention_interval", default=0)
    if interval:
        return LINEAR if (layer + 1) % interval else FULL
    attends = fields.get("attn_type_list")  # MiniMax
    if attends is not None:
        return FULL if attends[layer] else LINEAR
    return _attention_kind(fields, layer)


def _attention_kind(fields: Fields, layer: int) -> str:
    if fields.get("attention_chunk_size"):  # Llama 4
        unrotated = fields.integer("no_rope_layer_interval", default=4)
        return CHUNKED if (layer + 1) % unrotated else FULL
    slides = fields.get("hybrid_layer_pattern")  # MiMo
    if slides is not None:
        return SLIDING if slides[layer] else FULL
    if not fields.get("sliding_window") or fields.get("use_sliding_window") is False:
        return FULL
    if fields.get("use_sliding_window"):  # Qwen
        return SLIDING if layer >= fields.integer("max_window_layers", default=0) else FULL
    pattern = fields.get("sliding_window_pattern") or WINDOW_PATTERNS.get(
        str(fields.get("model_type"))
    )
    if isinstance(pattern, str):
        return PATTERN_LETTERS[pattern[layer % len(pattern)]]
    return FULL if pattern and (layer + 1) % pattern == 0 else SLIDING
