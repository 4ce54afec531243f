"""`model.batch_invariant` in an engine: the environment and arguments of vLLM, and options that contradict.

    VLLM_BATCH_INVARIANT=1      products, norms and log-softmax by kernels that do not depend on the batch
    TRITON_ATTN                 one kernel for prompts and decoding, which the trainer can call too
    no compiled layers          Inductor would replace vLLM's norms and gates by kernels of its own
    decoding in CUDA graphs     replays the same kernels

The trainer calls the same kernels: see `workers.model.batch_invariant`.
"""

from collections.abc import Mapping
from typing import Any

from workers.errors import ConfigError

ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "1",
    # The trainer calls the kernels of this runner's sampler.
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    # Tensor descriptors would read the keys in smaller tiles than the trainer's call.
    "VLLM_TRITON_USE_TD": "0",
}
CONTRADICTING = (
    "attention_backend",
    "decode_context_parallel_size",
    "enable_dbo",
    "kv_cache_dtype",
    "linear_backend",
    "optimization_level",
    "performance_mode",
    "quantization",
    "speculative_config",
)
"""Options of `rollout.engine` that change what an engine computes, or by which kernels."""


def batch_invariant_arguments(*, enforce_eager: bool) -> dict[str, Any]:
    """Return the arguments of an engine whose kernels the trainer shares."""
    graphs = "NONE" if enforce_eager else "FULL_DECODE_ONLY"
    return {
        "attention_backend": "TRITON_ATTN",
        "disable_cascade_attn": True,
        "compilation_config": {
            "mode": 0,
            "custom_ops": ["all"],
            "cudagraph_mode": graphs,
        },
    }


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option of `rollout.engine` that contradicts batch-invariant kernels."""
    for name in CONTRADICTING:
        if name in options:
            raise ConfigError(
                f"rollout.engine.{name}={options[name]}: with model.batch_invariant=true the engine "
                "computes as the trainer does. Remove it."
            )
