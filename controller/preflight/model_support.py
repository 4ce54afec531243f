"""Whether the training engine computes a model, by its config.json alone: before torch is imported or Ray starts.

    config.json --features--> layout, kernel, ring attention, tensor parallelism --> nothing, or what to change

The worker looks again at the loaded model, whose class may ask for more than its file says.
"""

from collections.abc import Mapping
from typing import Any

from controller.config import TrainingConfig
from workers.errors import ConfigError
from workers.model.families import (
    KERNEL_FEATURES,
    TENSOR_PARALLEL_FAMILIES,
    features_of_file,
    is_recurrent,
    uncomputed_features,
)


def check_supported_model(config: TrainingConfig, description: Mapping[str, Any], key: str) -> None:
    """Raise ConfigError, naming setting `key` and the feature, if config.json asks for what this run cannot compute."""
    text = description.get("text_config", description)
    model = f"{key}: a model of type {description.get('model_type', 'unknown')}"
    method = description.get("quantization_config", {}).get("quant_method")
    if method:
        raise ConfigError(f"{model} has weights quantized by {method}, which are not trained; take them in bfloat16.")
    layout = config.model.attention_layout(shared=config.shares_model)
    asked = uncomputed_features(text, layout)
    if asked:
        helps = layout == "packed" and not uncomputed_features(text, "padded")
        shares = helps and config.shares_model
        advice = "set model.layout=padded" + " and policy.parallel to 1" * shares if helps else "take another model"
        raise ConfigError(f"{model} with {', '.join(asked)}, which model.layout={layout} does not compute; {advice}.")
    _check_kernel(config, features_of_file(text), model)
    if config.policy.parallel.context_parallel > 1 and is_recurrent(text):
        raise ConfigError(
            f"{model} carries a state from token to token, which ranks that share a sequence do not hand on; set "
            "policy.parallel.context_parallel=1."
        )
    _check_ring(config, features_of_file(text), model)
    family = text.get("model_type", description.get("model_type"))
    if config.policy.parallel.tensor_parallel > 1 and family not in TENSOR_PARALLEL_FAMILIES:
        raise ConfigError(
            f"{model} is not shared by policy.parallel.tensor_parallel, which is for "
            f"{', '.join(TENSOR_PARALLEL_FAMILIES)}; set it to 1."
        )


def _check_kernel(config: TrainingConfig, features: frozenset[str], model: str) -> None:
    kernel, layout = config.model.attention, config.model.attention_layout(shared=config.shares_model)
    missing = features - KERNEL_FEATURES[layout].get(kernel, features)
    if missing:
        raise ConfigError(
            f"{model} with {', '.join(sorted(missing))}, which model.attention={kernel} does not compute with "
            f"model.layout={layout}; set model.attention=auto."
        )


def _check_ring(config: TrainingConfig, features: frozenset[str], model: str) -> None:
    parallel = config.policy.parallel
    if parallel.context_parallel == 1 or parallel.context_parallel_method != "ring":
        return
    if features:
        raise ConfigError(
            f"{model} with {', '.join(sorted(features))}, and ring attention is causal only; set "
            "policy.parallel.context_parallel_method=ulysses."
        )
    if config.uses_gpus and config.model.dtype == "float32":
        raise ConfigError(
            "policy.parallel.context_parallel_method=ring needs half precision on GPUs; set model.dtype=bfloat16, or "
            "ulysses."
        )
