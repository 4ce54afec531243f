"""A tiny configuration of every causal-LM family of transformers: few layers, of every kind that the family
has.

default configuration --sizes by name--> --lists a layer: one entry of each kind--> --special cases--> tiny
"""

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY, POSITIONS = 512, 128
MOST_KINDS = 4  # of layers in one model

SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCABULARY
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "model_max_length",
        ),
        POSITIONS,
    ),
    **dict.fromkeys(
        ("context_length", "max_target_positions", "max_source_positions"), POSITIONS
    ),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "embedding_size"),
        128,
    ),
    **dict.fromkeys(
        (
            "word_embed_proj_dim",
            "input_embedding_size",
            "output_embedding_size",
            "lru_width",
        ),
        128,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "n_inner",
            "dff",
        ),
        64,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "ffn_hidden_size",
            "d_inner",
        ),
        64,
    ),
    **dict.fromkeys(
        (
            "intermediate_size_mlp",
            "shared_intermediate_size",
            "dense_intermediate_size",
            "dim_ff",
        ),
        64,
    ),
    **dict.fromkeys(
        (
            "moe_shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
            "feed_forward_size",
        ),
        64,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4
    ),
    **dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads", "swa_num_attention_heads"), 4
    ),
    **dict.fromkeys(
        ("num_encoder_attention_heads", "num_decoder_attention_heads", "index_n_heads"), 4
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads"), 2
    ),
    **dict.fromkeys(
        ("head_dim", "dim_head", "d_head", "kv_channels", "swa_head_dim", "index_head_dim"),
        32,
    ),
    **dict.fromkeys(
        ("v_head_dim", "qk_nope_head_dim", "linear_key_head_dim", "linear_value_head_dim"),
        32,
    ),
    **dict.fromkeys(("linear_head_dim", "attention_head_size", "global_head_dim"), 32),
    **dict.fromkeys(
        (
            "qk_rope_head_dim",
            "rotary_dim",
            "o_lora_rank",
            "gated_norm_rank",
            "adapter_rank",
        ),
        16,
    ),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "hc_lowrank", "laurel_rank", "router_hidden_size"),
        32,
    ),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    **dict.fromkeys(
        ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4
    ),
    **dict.fromkeys(
        (
            "mamba_d_state",
            "state_size",
            "ssm_state_size",
            "mamba_dt_rank",
            "time_step_rank",
        ),
        8,
    ),
    **dict.fromkeys(
        ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2
    ),
    **dict.fromkeys(
        ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group"), 1
    ),
    **dict.fromkeys(
        (
            "topk_group",
            "num_expert_group",
            "mamba_n_groups",
            "n_groups",
            "first_k_dense_replace",
        ),
        1,
    ),
    **dict.fromkeys(("num_dense_layers", "zero_expert_num"), 1),
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), 8
    ),
    **dict.fromkeys(
        ("attention_chunk_size", "local_attention", "index_topk", "block_size"), 8
    ),
    **dict.fromkeys(("hidden_size_per_layer_input", "o_groups", "hc_count", "hc_mult"), 4),
    "num_kv_shared_layers": 0,
}
"""Upper bounds by the names that families give their sizes; heads are of a size that vLLM's CPU
kernels take.
"""

LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "num_blocks",
    "num_layers_per_stack",
)

FACTORS: dict[str, float] = {
    "initializer_range": 0.1,
    "init_std": 0.1,
    "logits_scaling": 3.0,
    "logit_scale": 0.4,
}
FACTORS |= {
    "lm_head_multiplier": 0.4,
    "embedding_multiplier": 2.0,
    "final_logit_softcapping": 2.0,
}
FACTORS |= {
    "attn_logit_softcapping": 2.0,
    "logits_mup_width_multiplier": 3.0,
    "residual_multiplier": 0.7,
}
"""Values that move the log-probs where a default would not."""

CHOICES: dict[str, Any] = {"is_decoder": True}
"""Encoders are made decoders, which transformers then trains with a causal mask."""

HYBRID = ["linear_attention", "full_attention"]
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 64},
    "blt": {"encoder_hash_byte_group_vocab": 96},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [8, 4, 4],
            }
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,  # with 64 for positions, vLLM's only kernel for latents
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "n_group": 1,
        "topk_group": 1,
    },
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 32},
    "gemma3n_text": {"intermediate_size": 64},
    "granitemoehybrid": {"layer_types": HYBRID, "mamba_d_head": 64},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2": {
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "full_attn_idxs": [1],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 64, "n_groups": 1},
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2},
    "ministral": {"head_dim": 32},
    "nemotron": {"head_dim": 32, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [32, 96], "axial_pos_shape": [8, 16]},
    "roc_bert": {
        "pronunciation_vocab_size": 96,
        "shape_vocab_size": 96,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
}
"""What a family needs beyond, by the type of the configuration."""


def tiny_config(model_type: str, sizes: dict[str, Any] | None = None) -> PreTrainedConfig:
    """A configuration with a few thousand parameters a layer. sizes: more upper bounds, or other ones than
    `SIZES`.

    Raises what the configuration's class raises.
    """
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**_shrunk(config_class(), SIZES | (sizes or {})))


def _shrunk(config: PreTrainedConfig, sizes: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that make `config` tiny."""
    given = {
        name: value for name, value in vars(config).items() if not name.startswith("_")
    }
    kinds = _layer_kinds(given)
    layers = max([2, *(len(set(map(str, kind))) for kind in kinds.values())])
    changed = {name: _cycled(kind, layers) for name, kind in kinds.items()}
    changed |= {name: layers for name in LAYERS if given.get(name)}
    changed |= {
        name: min(given[name], size)
        for name, size in sizes.items()
        if isinstance(given.get(name), int)
    }
    changed |= {
        name: value
        for name, value in (FACTORS | CHOICES).items()
        if given.get(name) is not None
    }
    changed |= {
        name: index % 2
        for index, name in enumerate(sorted(given))
        if _is_far_token(name, given[name])
    }
    for name in config.sub_configs:
        if isinstance(given.get(name), PreTrainedConfig):
            changed[name] = type(given[name])(**_shrunk(given[name], sizes))
    # One latent for all heads, and rotary positions on a part of each.
    if "kv_lora_rank" in given:
        changed |= {
            "num_key_value_heads": changed["num_attention_heads"],
            "head_dim": changed["qk_rope_head_dim"],
        }
    return changed | SPECIAL.get(config.model_type, {})


def _layer_kinds(given: dict[str, Any]) -> dict[str, list[Any]]:
    """Lists with an entry for every layer, unless each has one of its own: then they are numbers
    of layers.
    """
    counts = {given[name] for name in LAYERS if isinstance(given.get(name), int)} - {0}
    lists = {
        name: value
        for name, value in given.items()
        if isinstance(value, list) and len(value) in counts
    }
    return {
        name: value
        for name, value in lists.items()
        if len(set(map(str, value))) <= MOST_KINDS
    }


def _cycled(entries: list[Any], layers: int) -> list[Any]:
    """One entry of each kind in the order in which they first come, again and again."""
    kinds = [entry for index, entry in enumerate(entries) if entry not in entries[:index]]
    return [kinds[index % len(kinds)] for index in range(layers)]


def _is_far_token(name: str, value: Any) -> bool:
    return (
        name.endswith(("_token_id", "_index"))
        and isinstance(value, int)
        and value >= VOCABULARY
    )
