"""Read a Hugging Face folder with transformers: config, weights, tokenizer. Remote code is never run."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from workers.config.roles import ModelConfig
from workers.errors import BallastError, ConfigError, clause, describe_error
from workers.model.quantized import quantization_of, read_plain, without_quantization
from workers.model.rules.families import IMAGES_SEE_AHEAD
from workers.model.weight_files import Shapes


class LanguageModel:
    """Stand for transformers' auto class of a causal LM, or of a model that also sees images."""

    @staticmethod
    def _of(config: PreTrainedConfig) -> Any:
        sees = (
            type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            and config.model_type not in IMAGES_SEE_AHEAD
        )
        return AutoModelForImageTextToText if sees else AutoModelForCausalLM

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
        return cls._of(config).from_config(config, **options)

    @classmethod
    def from_pretrained(cls, path: str, *, config: PreTrainedConfig, **options: Any) -> Any:
        return cls._of(config).from_pretrained(path, config=config, **options)


def read_config(path: str, **options: Any) -> PreTrainedConfig:
    _check_path(path)
    try:
        return AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # transformers raises many types
        raise ConfigError(
            f"model.path={path} cannot be loaded: {clause(error)}."
        ) from error


def read_pretrained(
    auto_class: Any,
    config: ModelConfig,
    dtype: torch.dtype,
    skeleton: bool,
    shapes: Shapes | None,
    **options: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """Read the model at `config.path` by one of transformers' auto classes. options: of the model's
    configuration.

    Returns the model and the sorted names of weights that its files lack. A skeleton without `shapes` lacks
    none. Raises as `load_model` does.
    """
    hf_config = read_config(config.path, **options)
    key = f"model.path={config.path}"
    quantization = quantization_of(hf_config, key)
    hf_config = without_quantization(hf_config)
    try:
        if skeleton:
            with torch.device("meta"):
                model = auto_class.from_config(
                    hf_config, dtype=dtype, trust_remote_code=False
                )
            if shapes is None:
                return model, []
            shapes = quantization.plain_shapes(shapes, key) if quantization else shapes
            model, info = _filled_without_numbers(model, dtype, shapes)
        elif quantization is not None:
            model, info = read_plain(
                auto_class, hf_config, dtype, config.path, quantization
            )
        else:
            model, info = auto_class.from_pretrained(
                config.path,
                config=hf_config,
                dtype=dtype,
                local_files_only=True,
                # transformers does not pass it on when it looks for adapters: 24 s without a network
                adapter_kwargs={"local_files_only": True},
                trust_remote_code=False,
                output_loading_info=True,
            )
    except BallastError:
        raise
    except Exception as error:  # transformers raises many types
        raise ConfigError(
            f"model.path={config.path} cannot be loaded: {clause(error)}."
        ) from error
    for name, shape, expected in sorted(info["mismatched_keys"]):
        raise ConfigError(
            f"model.path={config.path}: {name} is {tuple(shape)} in the weight files and {tuple(expected)} "
            "by config.json. Use the config.json of these weights."
        )
    if left_out := [
        name for name in sorted(info["unexpected_keys"]) if _is_of_a_layer(model, name)
    ]:
        raise ConfigError(
            f"model.path={config.path}: the model that config.json describes has no {left_out[0]}, which "
            "would be left out. Use the config.json of these weights."
        )
    return model, sorted(info["missing_keys"])


def check_complete(path: str, missing: Sequence[str]) -> None:
    if missing:
        raise ConfigError(
            f"model.path={path} lacks {len(missing)} weights, the first is {missing[0]}"
        )


def _filled_without_numbers(
    skeleton: PreTrainedModel, dtype: torch.dtype, shapes: Shapes
) -> tuple[PreTrainedModel, dict[str, Any]]:
    state = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, shape in shapes.items()
    }
    path = skeleton.config.name_or_path
    loaded: tuple[PreTrainedModel, dict[str, Any]] = type(skeleton).from_pretrained(
        None,
        config=skeleton.config,
        dtype=dtype,
        state_dict=state,
        device_map="meta",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    loaded[0].config.name_or_path = path  # transformers sets None
    return loaded


def _is_of_a_layer(model: PreTrainedModel, weight: str) -> bool:
    if weight in dict(model.named_buffers()) or weight.endswith(".masked_bias"):
        return False
    layers = layers_of_decoder(model)
    owners = {
        name
        for name, part in model.named_modules()
        if part is layers or not any(part.children())
    }
    parts = weight.split(".")
    return any(".".join(parts[:count]) in owners for count in range(1, len(parts)))


def layers_of_decoder(model: PreTrainedModel) -> nn.ModuleList | None:
    return next(
        (
            child
            for child in decoder_of(model).children()
            if isinstance(child, nn.ModuleList)
        ),
        None,
    )


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model between embedding and output layer."""
    decoder = model.get_decoder()
    # transformers misses the decoder of Llama 4, whose prefix names a missing wrapper.
    return getattr(model, "model", decoder) if decoder is model else decoder


def load_tokenizer(path: str) -> Any:
    _check_path(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers and tokenizers raise many types
        raise ConfigError(
            f"model.path={path} has no tokenizer: {describe_error(error)}."
        ) from error
    # Without tokenizer files, transformers makes some families an empty tokenizer instead of an error.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ConfigError(f"model.path={path} has no tokenizer: its vocabulary is empty")
    return tokenizer


def _check_path(path: str) -> None:
    if path in ("", "???"):
        raise ConfigError(
            "model.path is not set. Give a folder with a Hugging Face model and tokenizer."
        )
