"""Fields of published config.json files, as they are written there, and counts made by hand.

Read in public repositories that quote the files, and compared with the defaults of transformers' classes where these
are of the same checkpoint.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """squared: forward FLOPs of attention per squared token, if all layers saw all. windows: (tokens, share,
    chunked). kv, state: numbers of a token and of a sequence.
    """

    config: dict[str, Any]
    squared: int
    kv: int
    state: int = 0
    windows: tuple[tuple[int, float, bool], ...] = ()


QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mlp_only_layers": [], "decoder_sparse_step": 1,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
    "num_experts_per_tok": 10, "vocab_size": 151936,
}  # fmt: skip
QWEN3_5_9B = {
    "model_type": "qwen3_5", "text_config": {
        "model_type": "qwen3_5_text", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "full_attention_interval": 4, "attn_output_gate": True,
        "intermediate_size": 12288, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "vocab_size": 248320,
    },
}  # fmt: skip
KIMI_LINEAR = {
    "model_type": "kimi_linear", "hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 72, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_experts": 256,
    "num_experts_per_token": 8, "num_shared_experts": 1, "vocab_size": 163840,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
        "short_conv_kernel_size": 4,
        "kda_layers": [layer for layer in range(1, 28) if layer not in (4, 8, 12, 16, 20, 24, 27)],
    },
}  # fmt: skip
JAMBA_MINI = {
    "model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1,
    "expert_layer_period": 2, "intermediate_size": 14336, "mamba_d_conv": 4, "mamba_d_state": 16,
    "mamba_dt_rank": 256, "mamba_expand": 2, "num_experts": 16, "num_experts_per_tok": 2,
    "sliding_window": None, "vocab_size": 65536,
}  # fmt: skip
NEMOTRON_H_8B = {
    "model_type": "nemotron_h", "hidden_size": 4096, "num_hidden_layers": 52, "num_attention_heads": 32,
    "num_key_value_heads": 8, "attention_head_dim": 128, "intermediate_size": 21504,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "conv_kernel": 4, "expand": 2, "mamba_head_dim": 64, "mamba_num_heads": 128, "n_groups": 8,
    "ssm_state_size": 128, "vocab_size": 131072,
}  # fmt: skip
GRANITE_H_SMALL = {
    "model_type": "granitemoehybrid", "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 768, "shared_intermediate_size": 1536,
    "num_local_experts": 72, "num_experts_per_tok": 10, "mamba_d_conv": 4, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "vocab_size": 100352,
    "tie_word_embeddings": True,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
}  # fmt: skip
BAMBA_9B = {
    "model_type": "bamba", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27], "intermediate_size": 14336,
    "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_n_heads": 128, "vocab_size": 128256,
}  # fmt: skip
LFM2_350M = {
    "model_type": "lfm2", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 8, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "block_dim": 1024,
    "block_ff_dim": 6656, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True, "vocab_size": 65536, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_4_MAVERICK = {
    "model_type": "llama4", "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 2, "num_local_experts": 128,
        "num_experts_per_tok": 1, "no_rope_layers": [], "vocab_size": 202048,
    },
}  # fmt: skip
GEMMA_3_4B = {
    "model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 10240, "sliding_window": 1024,
        "vocab_size": 262208, "tie_word_embeddings": True,
    },
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
    "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip

DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "vocab_size": 129280,
}
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
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}
MIXTRAL = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}

PUBLISHED = {
    # transformers, qwen3_next, and a reader's test of Qwen3-Coder-Next
    "Qwen3-Next-80B-A3B": Published(
        QWEN3_NEXT,
        squared=12 * 2 * 16 * 256,
        kv=12 * 2 * 2 * 256,
        state=36 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)),
    ),
    # transformers, qwen3_5
    "Qwen3.5-9B": Published(
        QWEN3_5_9B,
        squared=8 * 2 * 16 * 256,
        kv=8 * 2 * 4 * 256,
        state=24 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)),
    ),
    # moonshotai/Kimi-Linear-48B-A3B-Instruct, quoted by a reader's test
    "Kimi-Linear-48B-A3B": Published(
        KIMI_LINEAR,
        squared=7 * 32 * (128 + 64 + 128),
        kv=7 * (512 + 64),
        state=20 * (32 * 128 * 128 + 3 * 3 * 32 * 128),
    ),
    # ai21labs/AI21-Jamba-1.5-Mini, quoted by onnx-diagnostic
    "Jamba-1.5-Mini": Published(
        JAMBA_MINI,
        squared=4 * 2 * 32 * 128,
        kv=4 * 2 * 8 * 128,
        state=28 * 8192 * (16 + 3),
    ),
    # nvidia/Nemotron-H-8B-Base-8K, quoted by Megatron-Bridge's tests
    "Nemotron-H-8B": Published(
        NEMOTRON_H_8B,
        squared=4 * 2 * 32 * 128,
        kv=4 * 2 * 8 * 128,
        state=24 * (128 * 64 * 128 + 3 * (128 * 64 + 2 * 8 * 128)),
    ),
    # ibm-granite/granite-4.0-h-small, quoted by a parameter counter's page
    "Granite-4.0-H-Small": Published(
        GRANITE_H_SMALL,
        squared=4 * 2 * 32 * 128,
        kv=4 * 2 * 8 * 128,
        state=36 * (128 * 64 * 128 + 3 * (128 * 64 + 2 * 128)),
    ),
    # ibm-ai-platform/Bamba-9B, quoted by a reader's test, and transformers, bamba
    "Bamba-9B": Published(
        BAMBA_9B,
        squared=3 * 2 * 32 * 128,
        kv=3 * 2 * 8 * 128,
        state=29 * (128 * 64 * 128 + 3 * (128 * 64 + 2 * 128)),
    ),
    # LiquidAI/LFM2-350M, quoted by a loader's test
    "LFM2-350M": Published(
        LFM2_350M,
        squared=6 * 2 * 16 * 64,
        kv=6 * 2 * 8 * 64,
        state=10 * 1024 * 2,
    ),
    # meta-llama/Llama-4-Maverick-17B-128E, quoted by TensorRT-LLM's test
    "Llama-4-Maverick": Published(
        LLAMA_4_MAVERICK,
        squared=48 * 2 * 40 * 128,
        kv=48 * 2 * 8 * 128,
        windows=((8192, 36 / 48, True),),
    ),
    # google/gemma-3-4b-it, quoted by a loader's test
    "Gemma-3-4B": Published(
        GEMMA_3_4B,
        squared=34 * 2 * 8 * 256,
        kv=34 * 2 * 4 * 256,
        windows=((1024, 29 / 34, False),),
    ),
    # transformers, gpt_oss, with the 24 layers and 32 experts of openai/gpt-oss-20b
    "gpt-oss-20b": Published(
        GPT_OSS_20B,
        squared=24 * 2 * 64 * 64,
        kv=24 * 2 * 8 * 64,
        windows=((128, 1 / 2, False),),
    ),
}
