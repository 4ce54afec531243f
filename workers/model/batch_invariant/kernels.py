"""The batch-invariant kernels of vLLM, borrowed by name, as flash-attn's are.

The ratio of trainer to engine is exactly 1 only if both run the same kernel. So none is written anew here:
the engine's own functions are called with tensors of the trainer. vLLM is imported at the first call, and
its functions are compared with what is called here.
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from workers.errors import ConfigError

VARIABLE = "VLLM_BATCH_INVARIANT"
"""Also read by vLLM's compiled kernels, at their first call."""
LEAST_CAPABILITY = 9
"""Major compute capability that vLLM 0.32 asks for (`vllm/envs.py`)."""
CALLED = {
    "vllm.model_executor.determinism.batch_invariant": {
        "linear_batch_invariant": "input weight bias",
        "rms_norm_batch_invariant": "input weight eps",
    },
    "vllm._custom_ops": {
        "fused_add_rms_norm": "input residual weight epsilon",
        "rotary_embedding": "positions query key head_size cos_sin_cache is_neox",
    },
    "vllm.v1.attention.ops.triton_unified_attention": {
        "unified_attention": "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k "
        "softmax_scale causal window_size block_table softcap q_descale k_descale v_descale",
    },
    "vllm.v1.worker.gpu.sample.gumbel": {
        "apply_temperature": "logits expanded_idx_mapping temperature",
    },
    "vllm.v1.worker.gpu.sample.logprob": {"compute_token_logprobs": "logits token_ids"},
}
"""Functions of vLLM by module, with the arguments that they are called with here."""
GATE = "silu_and_mul"
"""An operator of vLLM's compiled library: (out, input)."""


@dataclass(frozen=True)
class Kernels:
    """Hold vLLM's functions under their names there. silu_and_mul writes to its first argument."""

    linear_batch_invariant: Callable[..., Any]
    rms_norm_batch_invariant: Callable[..., Any]
    fused_add_rms_norm: Callable[..., Any]
    rotary_embedding: Callable[..., Any]
    unified_attention: Callable[..., Any]
    apply_temperature: Callable[..., Any]
    compute_token_logprobs: Callable[..., Any]
    silu_and_mul: Callable[..., Any]


@cache
def load_kernels() -> Kernels:
    """Import vLLM's kernels. Raises ConfigError if it is missing, or has other functions."""
    os.environ[VARIABLE] = "1"
    functions: dict[str, Any] = {}
    for module_name, names in CALLED.items():
        try:
            module = import_module(module_name)
        except ImportError as error:
            raise ConfigError(
                f"model.batch_invariant=true: {module_name} cannot be imported ({error}). "
                "Install vLLM where the policy trains, or set false."
            ) from error
        for name, arguments in names.items():
            functions[name] = _checked(module, name, arguments)
    # Of vLLM's compiled library, which `vllm._custom_ops` has loaded.
    functions[GATE] = getattr(torch.ops._C, GATE)
    return Kernels(**functions)


def _checked(module: Any, name: str, arguments: str) -> Any:
    function = getattr(module, name, None)
    parameters = set(inspect.signature(function).parameters) if function else set()
    missing = set(arguments.split()) - parameters
    if missing:
        raise ConfigError(
            f"model.batch_invariant=true: {name} of the installed vLLM has no "
            f"{', '.join(sorted(missing))}. Install vllm==0.32.0, or set false."
        )
    return function


def check_card(device: torch.device) -> None:
    """Raise ConfigError for a device that vLLM's kernels are not batch-invariant on."""
    if device.type == "cpu":
        raise ConfigError(
            f"model.batch_invariant=true: needs a CUDA device, and this one is {device}. Set false."
        )
    if device.type != "cuda":  # a simulated card
        return
    major, minor = torch.cuda.get_device_capability(device)
    if major < LEAST_CAPABILITY:
        raise ConfigError(
            f"model.batch_invariant=true: needs a card of compute capability {LEAST_CAPABILITY}.0 or "
            f"above, and this one has {major}.{minor}. Set false."
        )
