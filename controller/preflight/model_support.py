"""Checks by config.json that the training engine computes a model, before torch is imported or Ray starts.

    config.json --features--> layout, kernel, ring attention, tensor parallelism --> nothing, or what to change

The worker checks the loaded model again, because its class may need more than its file says.
"""

from collections.abc import Mapping
from typing import Any

from controller.config import TrainingConfig
from workers.errors import ConfigError
from workers.model.families import features_of_file, is_recurrent
from workers.model.model_rules import (
    check_adapters,
    check_context_parallel,
    check_expert_parallel,
    check_kernel_features,
    check_layout,
    check_pipeline_parallel,
    check_router_losses,
    check_router_replay,
    check_tensor_parallel,
    shares_prefixes,
)


def check_supported_model(config: TrainingConfig, description: Mapping[str, Any], key: str) -> None:
    """Raise ConfigError, naming setting `key` and the feature, if config.json asks for what this run cannot compute."""
    text = description.get("text_config", description)
    model = f"{key}: a model of type {description.get('model_type', 'unknown')}"
    method = description.get("quantization_config", {}).get("quant_method")
    if method:
        raise ConfigError(f"{model} has weights quantized by {method}, which are not trained; take them in bfloat16.")
    layout = config.model.attention_layout(shared=config.shares_model)
    parallel, features = config.policy.parallel, features_of_file(text)
    check_layout(text, layout, model, shared=config.shares_model)
    check_kernel_features(config.model.attention, layout, features, model)
    heads = text.get("num_attention_heads", text.get("n_head"))
    check_context_parallel(parallel, model, recurrent=is_recurrent(text), heads=heads, features=features)
    shares_prefixes(
        config.model,
        features,
        model,
        recurrent=is_recurrent(text),
        cuda=config.uses_gpus,
        half=config.model.dtype != "float32",
    )
    check_pipeline_parallel(parallel, config.model, model, text.get("num_hidden_layers"))
    family = text.get("model_type", description.get("model_type", ""))
    check_tensor_parallel(parallel, config.model, model, family, text)
    check_expert_parallel(parallel, config.model, model, text)
    if key == "model.path":
        check_adapters(config.model, model, family)
        check_router_replay(config.model, model, text)
        check_router_losses(config.model, model, family)
