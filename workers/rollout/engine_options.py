"""`rollout.engine`: arguments of vLLM that are passed through to its engines, and those that are refused.

    {quantization: fp8} --a field of vLLM's? --no setting of ours? --goes with updates of weights?--> AsyncEngineArgs

vLLM's fields are read from its source, not by importing it: a dry run takes a second, an import of vLLM ten.
"""

import ast
import difflib
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.errors import ConfigError

OWNED = {
    "model": "model.path",
    "model_weights": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "enable_lora": "model.lora (adapters are merged into the weights that engines get)",
    "seed": "run.seed",
    "max_model_len": "rollout.max_model_tokens",
    "max_num_seqs": "rollout.max_concurrent",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "pipeline_parallel_size": "rollout.tensor_parallel (an engine's GPUs are reserved by it)",
    "data_parallel_size": "rollout.replicas",
    "distributed_executor_backend": "rollout.tensor_parallel",
    "gpu_memory_utilization": "rollout.memory_fraction",
    "kv_cache_memory_bytes": "rollout.memory_fraction, on a CPU rollout.cpu_kv_cache_gib",
    "enforce_eager": "rollout.enforce_eager",
    "enable_sleep_mode": "rollout.placement",
    "enable_return_routed_experts": "model.router_replay",
    "weight_transfer_config": "rollout.placement",
}
"""vLLM's arguments that follow from our settings, and the setting of each."""

REFUSED = {
    "trust_remote_code": "code of a model is never run",
    "logprobs_mode": "log-probs are those of the distribution that the trainer computes, which the loss relies on",
    "logits_processors": "samples would come from another distribution than the one that the trainer computes",
    "hf_overrides": "the engine would compute another model than the trainer; change the config.json of model.path",
    "hf_config_path": "the engine would compute another model than the trainer; change the config.json of model.path",
    "enable_eplb": "experts that change their GPU cannot be followed by updates of weights",
    "cpu_offload_gb": "weights in host memory cannot be followed by updates; raise rollout.memory_fraction or "
    "rollout.tensor_parallel",
    "offload_group_size": "weights in host memory cannot be followed by updates; raise rollout.memory_fraction or "
    "rollout.tensor_parallel",
}
"""vLLM's arguments that no setting may change, and why."""

ONLINE_QUANTIZATION = (
    "fp8",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "mxfp8",
)
"""Methods that quantize plain weights as vLLM loads them, and again with every update."""

DRAFTS_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")


def check_engine_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that vLLM does not have, that a setting of ours determines, or that would break
    updates of weights.

    Names are not checked if vLLM is not installed.
    """
    known = vllm_fields()
    for name, value in options.items():
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see the fields of vllm.EngineArgs."
            raise ConfigError(f"rollout.engine.{name} is not an argument of vLLM's engines; {hint}")
        if name in OWNED:
            raise ConfigError(f"rollout.engine.{name} follows from {OWNED[name]}; set that instead.")
        if name in REFUSED:
            raise ConfigError(f"rollout.engine.{name} cannot be set: {REFUSED[name]}.")
        _check_value(name, value)


def _check_value(name: str, value: Any) -> None:
    if name == "quantization" and value is not None and value not in ONLINE_QUANTIZATION:
        raise ConfigError(
            f"rollout.engine.quantization={value} is for weights that were quantized beforehand, and the policy's are "
            f"not; use one of {', '.join(ONLINE_QUANTIZATION)}."
        )
    if name == "speculative_config":
        method = value.get("method") if isinstance(value, Mapping) else None
        if method not in DRAFTS_WITHOUT_WEIGHTS:
            raise ConfigError(
                f"rollout.engine.speculative_config: the draft model of method={method} gets no new weights, and fits "
                f"the policy less with every step; use one of {', '.join(DRAFTS_WITHOUT_WEIGHTS)}."
            )
    if name == "load_format" and value == "dummy":
        raise ConfigError("rollout.engine.load_format=dummy: the first samples would come from random weights.")


@functools.cache
def vllm_fields() -> frozenset[str]:
    """Fields of vLLM's AsyncEngineArgs; none where vLLM is not installed."""
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return frozenset()
    source = Path(package.submodule_search_locations[0], "engine", "arg_utils.py").read_text()
    return frozenset(
        statement.target.id
        for part in ast.parse(source).body
        if isinstance(part, ast.ClassDef) and part.name in ("EngineArgs", "AsyncEngineArgs")
        for statement in part.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )
