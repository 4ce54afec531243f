"""Adapters in peft's format, from which a policy begins.

adapter_config.json --differs from the settings--> ConfigError, by name
adapter_model.safetensors --names and shapes--> A and B of the model     a skeleton is only checked
"""

import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from workers.config.roles import LoraConfig
from workers.errors import ConfigError, clause
from workers.json_file import read_json
from workers.model.moe.expert_adapters import ADAPTER, take_stored_weights

FILE = "adapter_model.safetensors"
SETTINGS = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora"}
"""peft's fields and the settings that must agree with them."""
ABOUT_TRAINING = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "inference_mode",
    "lora_dropout",
    "peft_version",
    "revision",
    "target_modules",
    "target_parameters",
    "task_type",
}
"""Fields that do not change what stored adapters compute. The weights' names show the target modules."""
RANDOM = ("eva", "gaussian", "lora_ga", "mica", "orthogonal")
"""Values of `init_lora_weights` that leave the base model as it is on disk."""


def load_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Give A and B of `model` the values in the folder `config.path`, in place.

    Raises ConfigError if the folder holds other adapters than the settings describe, also for a skeleton.
    """
    import peft

    key = f"model.lora.path={config.path}"
    folder = Path(config.path)
    stored = peft.LoraConfig().to_dict() | read_json(folder / "adapter_config.json", key)
    _check_settings(key, stored, model.peft_config[ADAPTER].to_dict(), config)
    weights = _read_weights(folder / FILE, key)
    try:
        weights = take_stored_weights(model, weights)
    except ValueError as error:
        raise ConfigError(f"{key}: the adapters are of another model: {error}.") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a skeleton takes no values
            result: Any = peft.set_peft_model_state_dict(
                model, weights, adapter_name=ADAPTER
            )
    except RuntimeError as error:  # of torch, for shapes
        raise ConfigError(
            f"{key}: the adapters are of another model: {clause(error)}."
        ) from error
    missing = [
        name
        for name in result.missing_keys
        if is_adapter(name) and not name.endswith(f".{ADAPTER}")
    ]
    if names := sorted(result.unexpected_keys) or missing:
        modules = sorted(
            {name.partition(".lora_")[0].rpartition(".")[2] for name in weights}
        )
        problem = "has no place here" if result.unexpected_keys else "is missing there"
        raise ConfigError(
            f"{key}: {names[0]} {problem}. If model.path={model.name_or_path} is the model of the adapters, "
            f"set model.lora.target_modules={','.join(modules)}."
        )


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _check_settings(
    key: str, stored: dict[str, Any], ours: dict[str, Any], config: LoraConfig
) -> None:
    for field, name in SETTINGS.items():
        if stored[field] != ours[field]:
            fix = f"{key} has {field}={stored[field]}. Set {stored[field]}."
            raise ConfigError(f"model.lora.{name}={getattr(config, name)}: {fix}")
    parameters = _last_parts(stored["target_parameters"])
    if parameters != _last_parts(ours["target_parameters"]):
        raise ConfigError(
            f"model.lora.target_parameters={config.target_parameters}: {key} has adapters of "
            f"{','.join(parameters) or 'no such weights'}. Set {','.join(parameters) or 'none'}."
        )
    for field, value in stored.items():
        if (
            field in ABOUT_TRAINING
            or value == ours.get(field)
            or not (value or ours.get(field))
        ):
            continue
        if field == "init_lora_weights" and (value is False or value in RANDOM):
            continue
        if field not in ours and not isinstance(value, (bool, dict, list)):
            continue  # a newer peft's default of a feature whose switch is another field
        raise ConfigError(
            f"{key}: {field}={value} of its adapter_config.json is not trained. Merge the adapters by "
            "peft_model.merge_and_unload(), and set model.path to the result."
        )


def _last_parts(names: Any) -> list[str]:
    """Return `experts.down_proj` for a name like `mlp.experts.down_proj`."""
    return sorted(".".join(str(name).split(".")[-2:]) for name in names or ())


def _read_weights(file: Path, key: str) -> dict[str, Tensor]:
    pickled = file.with_suffix(".bin")
    if not file.is_file() and pickled.is_file():
        raise ConfigError(
            f"{key}: {pickled} is a pickle, which may run code. Save the adapters by "
            "peft_model.save_pretrained(...) with safetensors."
        )
    if not file.is_file():
        raise ConfigError(
            f"{key}: {file} is missing. Save the adapters by peft_model.save_pretrained(...) with "
            "safetensors."
        )
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{key}: {file} cannot be read: {clause(error)}.") from error
    others = [name for name in weights if not is_adapter(name)]
    if others:
        raise ConfigError(
            f"{key}: it also holds {others[0]}, which is not trained. Merge the adapters by "
            "peft_model.merge_and_unload(), and set model.path to the result."
        )
    return weights
