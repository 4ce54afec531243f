"""Build a model without its weights, to check in a second whether its files can be trained.

    config.json --transformers--> modules on the meta device <--names, shapes-- headers of the weight files

transformers reports missing and left-over tensors, and other shapes: it loads tensors with sizes only.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from workers.config.roles import ModelConfig
from workers.errors import ConfigError, UnsupportedModelError
from workers.json_file import read_json
from workers.model.model import PackedModel
from workers.model.pretrained import (
    LanguageModel,
    check_complete,
    read_config,
    read_pretrained,
)
from workers.model.quantized import quantization_of
from workers.model.value_head import HEAD, LOADERS
from workers.model.weight_files import weight_shapes

CLASSES: dict[str, tuple[Any, ...]] = {
    "lm": (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    ),
    "value": (modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,),
}
"""Model classes by configuration, for each head."""


def build_skeleton(
    settings: ModelConfig, folder: Path, head: str, *, trained: bool, weights: bool
) -> PackedModel:
    """Build the model in `folder` on the meta device, and compare it with the weight files if there are
    `weights`.

    head: as in `TrainingEngine`. trained: whether a value head may be new, and the model a causal LM. Raises
    ConfigError or UnsupportedModelError, naming model.path, if the training engine cannot load the model.
    """
    check_kind(folder, (head, "lm") if trained else (head,))
    shapes = weight_shapes(folder) if weights else None
    labels = (shapes or {}).get(f"{HEAD}.weight", (1,))[0]
    if head == "value" and labels != 1:
        raise ConfigError(
            f"model.path={folder}: it has {labels} labels. Take a reward model, which has one."
        )
    with _quiet():
        packed = LOADERS[head](
            replace(settings, path=str(folder)), torch.float32, skeleton=True, shapes=shapes
        )
    if (
        head == "value"
        and not trained
        and shapes is not None
        and f"{HEAD}.weight" not in shapes
    ):
        raise ConfigError(
            f"model.path={folder}: the weight files have no {HEAD}.weight. Take a reward model."
        )
    return packed


def build_sampled(settings: ModelConfig, folder: Path, *, weights: bool) -> PreTrainedModel:
    """Do the same for a model that is only sampled from, which the training engine's rules do not bind."""
    check_kind(folder, ("lm",))
    if quantization := quantization_of(read_config(str(folder)), f"model.path={folder}"):
        raise UnsupportedModelError(
            f"model.path={folder}: weights quantized by {quantization.method} are trained, and without a "
            "trainer no engine gets them. Take them in bfloat16."
        )
    shapes = weight_shapes(folder) if weights else None
    with _quiet():
        settings = replace(settings, path=str(folder))
        model, missing = read_pretrained(
            LanguageModel, settings, torch.float32, True, shapes
        )
    check_complete(settings.path, missing)
    return model


def check_kind(folder: Path, heads: tuple[str, ...]) -> None:
    """Raise ConfigError unless config.json describes a model of transformers' own that has one of the
    `heads`.
    """
    key = f"model.path={folder}"
    description = read_json(folder / "config.json", key)
    family = description.get("model_type")
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        if "auto_map" in description:
            problem = (
                f"model_type={family} needs code from the model's folder, which is never run. Take another "
                "model"
            )
        elif family is None:
            problem = "config.json names no model_type. Put the config.json of these weights there"
        else:
            problem = (
                f"the installed transformers has no model_type={family}. Take "
                "another model, or update it"
            )
        raise ConfigError(f"{key}: {problem}.")
    config = read_config(str(folder))
    quantization_of(config, key)
    if (
        heads[0] == "value"
        and type(config) in CLASSES["lm"][1]
        and type(config) not in CLASSES["value"][0]
    ):
        raise UnsupportedModelError(
            f"{key}: {family} reads images, and has no value head. Take a model of text."
        )
    wrong_names = [
        name for name in config.architectures or () if _has_another_head(name, heads)
    ]
    if wrong_names or not any(
        type(config) in table for head in heads for table in CLASSES[head]
    ):
        kind = (
            "a sequence classification"
            if heads == ("value",)
            else "a causal language model"
        )
        raise ConfigError(
            f"{key}: {' or '.join(wrong_names) or family} is not {kind}. Take another model."
        )


def _has_another_head(architecture: str, heads: tuple[str, ...]) -> bool:
    tables = {
        name: table
        for name, table in vars(modeling_auto).items()
        if name.endswith("_MAPPING_NAMES")
    }

    def has_architecture(table: Mapping[str, Any]) -> bool:
        return any(architecture in _names(class_names) for class_names in table.values())

    uses = {name for name, table in tables.items() if has_architecture(table)}
    kinds = {
        "lm": ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT"),
        "value": ("SEQUENCE_CLASSIFICATION",),
    }
    return bool(uses) and not uses & {
        f"MODEL_FOR_{kind}_MAPPING_NAMES" for head in heads for kind in kinds[head]
    }


def _names(classes: Any) -> tuple[str, ...]:
    return (classes,) if isinstance(classes, str) else tuple(classes)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' report on missing weights off the console: it becomes an error."""
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
