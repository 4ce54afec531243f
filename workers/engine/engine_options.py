"""`rollout.engine`: the vLLM arguments that are passed through, and those that are refused.

    {quantization: fp8} --allowed?--> compatible with weight updates? --> AsyncEngineArgs

Only listed arguments pass: others name classes, modules, files or addresses, and so could run code or reach
out.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from workers.errors import ConfigError

ALLOWED = {
    "all2all_backend", "async_scheduling", "attention_backend", "block_size", "cudagraph_capture_sizes",
    "decode_context_parallel_size", "disable_cascade_attn", "disable_custom_all_reduce",
    "disable_hybrid_kv_cache_manager", (
        "disable_log_stats"
    ), "distributed_timeout_seconds", "enable_chunked_prefill",
    "enable_dbo", "enable_expert_parallel", "enable_flashinfer_autotune", "enable_prefix_caching",
    "expert_placement_strategy", "gdn_prefill_backend", "kv_cache_dtype", "kv_cache_dtype_skip_layers",
    "linear_backend", "load_format", "long_prefill_token_threshold", "mamba_backend", "mamba_block_size",
    "mamba_cache_dtype", "mamba_cache_mode", "mamba_ssm_cache_dtype", "max_cudagraph_capture_size",
    "max_num_batched_tokens", (
        "max_parallel_loading_workers"
    ), "moe_backend", "num_gpu_blocks_override", "numa_bind",
    "optimization_level", "performance_mode", "quantization", "skip_mm_profiling", "speculative_config",
    "stream_interval", "use_fp64_gumbel", "use_tqdm_on_load",
}  # fmt: skip
"""Change speed and memory, by plain values."""

OWNED = {
    "model": "model.path",
    "model_weights": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "enable_lora": "model.lora.sync and model.lora.policies",
    "max_loras": "model.lora.policies and model.lora.versions",
    "max_lora_rank": "model.lora.rank",
    "seed": "run.seed",
    "max_model_len": "rollout.max_model_tokens",
    "max_num_seqs": "rollout.max_concurrent",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "pipeline_parallel_size": "rollout.tensor_parallel (an engine's GPUs are reserved by it)",
    "data_parallel_size": "rollout.replicas",
    "distributed_executor_backend": "rollout.tensor_parallel",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.gpu_memory_utilization, on a CPU rollout.cpu_kv_cache_gib",
    "enforce_eager": "rollout.enforce_eager",
    "enable_sleep_mode": "rollout.placement",
    "enable_return_routed_experts": "model.router_replay",
    "weight_transfer_config": "rollout.placement",
    "additional_config": "model.train_vision",
    "limit_mm_per_prompt": "data.image_key (a prompt has as many images as its record)",
}
"""Follow from our settings."""

REFUSED = {
    "trust_remote_code": "code of a model is never run",
    "logprobs_mode": "the loss relies on log-probs of the distribution that the trainer computes",
    "logits_processors": (
        "samples would come from another distribution than the one that the trainer computes"
    ),
    "hf_overrides": (
        "the engine would compute another model than the trainer. Change the config.json of model.path"
    ),
    "hf_config_path": (
        "the engine would compute another model than the trainer. Change the config.json of model.path"
    ),
    "mm_processor_cache_gb": "the engine's actor keeps processed images",
    "enable_eplb": "experts that change their GPU cannot be followed by updates of weights",
    "cpu_offload_gb": (
        "weights in host memory cannot be followed by updates. Raise rollout.gpu_memory_utilization or "
        "rollout.tensor_parallel"
    ),
    "offload_group_size": (
        "weights in host memory cannot be followed by updates. Raise rollout.gpu_memory_utilization or "
        "rollout.tensor_parallel"
    ),
}
"""No setting may change them."""

ONLINE_QUANTIZATION = (
    "fp8",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "mxfp8",
)
"""Methods that quantize plain weights as vLLM loads them, and again with every update."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`, which adapters of lower ranks fit into."""

DRAFTS_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")


def check_engine_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that is unknown, follows from another setting, or breaks weight
    updates.
    """
    for name, value in options.items():
        if name in OWNED:
            raise ConfigError(
                f"rollout.engine.{name} follows from {OWNED[name]}. Set that instead."
            )
        if name in REFUSED:
            raise ConfigError(f"rollout.engine.{name} cannot be set: {REFUSED[name]}.")
        if name not in ALLOWED:
            near = difflib.get_close_matches(name, ALLOWED, n=1)
            hint = (
                f"Did you mean {near[0]}?"
                if near
                else f"Use one of {', '.join(sorted(ALLOWED))}."
            )
            raise ConfigError(
                f"rollout.engine.{name}: not an argument of vLLM that passes through. {hint}"
            )
        _check_value(name, value)


def _check_value(name: str, value: Any) -> None:
    if name == "quantization" and value is not None and value not in ONLINE_QUANTIZATION:
        raise ConfigError(
            f"rollout.engine.quantization={value} is for weights that were quantized beforehand, and the "
            f"policy's are not. Use one of {', '.join(ONLINE_QUANTIZATION)}."
        )
    if name == "speculative_config":
        method = value.get("method") if isinstance(value, Mapping) else None
        if method not in DRAFTS_WITHOUT_WEIGHTS:
            raise ConfigError(
                f"rollout.engine.speculative_config: the draft model of method={method} gets no new "
                "weights, and fits the policy less with every step. Use one of "
                f"{', '.join(DRAFTS_WITHOUT_WEIGHTS)}."
            )
        if extra := [
            key
            for key, part in value.items()
            if key != "method" and not isinstance(part, (int, float))
        ]:
            raise ConfigError(
                f"rollout.engine.speculative_config.{extra[0]}: expected a number. Leave it out."
            )
    if name == "load_format" and value not in ("auto", "safetensors"):
        raise ConfigError(
            f"rollout.engine.load_format={value}: weights are safetensors. Use auto or safetensors."
        )
