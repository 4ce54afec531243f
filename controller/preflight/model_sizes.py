"""Checks of adapters and KV cache against a model's layers, for the families that `model_shape` knows.

config.json --ModelShape--> names that adapters can go to; KV cache of one sequence --> nothing, or ConfigError
"""

import math

from controller.config import Config, TrainingConfig
from controller.config.model_files import ModelFiles
from controller.preflight.model_shape import FAMILIES, ModelShape, model_shape
from workers.errors import ConfigError

KV_BLOCK_TOKENS = 32  # of an engine on CPU, see workers.rollout.engine
ALL_LINEAR = "all-linear"


def check_model_sizes(config: TrainingConfig, model: ModelFiles) -> None:
    """Raise ConfigError for adapters at modules that are not there, or a KV cache that no sequence fits into."""
    if model.description.get("model_type") not in FAMILIES:
        return
    shape = model_shape(model.description)
    _check_adapters(config, shape)
    if isinstance(config, Config) and not config.uses_gpus and "kv_cache_dtype" not in config.rollout.engine:
        _check_kv_cache(config, shape)


def _check_adapters(config: TrainingConfig, shape: ModelShape) -> None:
    targets = config.model.lora.target_modules
    if not config.model.lora.rank or targets == ALL_LINEAR or shape.experts:
        return
    known = shape.linear_modules
    missing = [name for name in (part.strip() for part in targets.split(",")) if name not in known]
    if missing:
        raise ConfigError(
            f"model.lora.target_modules={targets}: {config.model.path} has no module {missing[0]!r} that takes an "
            f"adapter; it has {', '.join(known)}."
        )


def _check_kv_cache(config: Config, shape: ModelShape) -> None:
    """Keys and values of the longest sequence, in whole blocks: an engine that has less memory does not start."""
    width = 1 if config.model.dtype == "bfloat16" else 2  # in values of half precision
    tokens = KV_BLOCK_TOKENS * math.ceil(config.max_model_tokens / KV_BLOCK_TOKENS)
    needed = width * shape.kv_bytes_per_token * tokens / config.rollout.tensor_parallel / 2**30
    if needed > config.rollout.cpu_kv_cache_gib:
        raise ConfigError(
            f"rollout.cpu_kv_cache_gib={config.rollout.cpu_kv_cache_gib:g} is less than the {needed:.2g} GiB that the "
            f"keys and values of one sequence of {config.max_model_tokens} tokens take; raise it, or lower "
            "rollout.max_model_tokens, data.max_prompt_tokens or the limits of a response."
        )
