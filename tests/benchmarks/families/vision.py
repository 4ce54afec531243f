"""Tiny models of families that see images, their sequences with images, and transformers' own answers.

tests/workers/vision_families.py, or the type's classes put together: model, tokenizer, processor --> folder
texts and pictures --whole processor, whole model, one at a time--> expected log-probs and gradient
                   --Placeholders--> sequences with images, as a run has them
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForImageTextToText,
    AutoProcessor,
)
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

from tests.benchmarks.families.measuring import (
    EXPECTED,
    TOLERANCE,
    Outcome,
    fill_zeros,
    named,
)
from tests.benchmarks.families.shrinking import tiny_config
from tests.workers.vision_families import (
    BUILDERS,
    byte_tokenizer,
    pictures,
    save_tiny_vision_model,
)
from workers.batch.dataproto import DataProto, object_column
from workers.batch.placed_images import Image
from workers.errors import BallastError, ConfigError
from workers.images.images import digest_of, png_of
from workers.images.placeholders import Placeholders
from workers.model.rules.families import IMAGES_SEE_AHEAD

TEXTS = (
    ("ab{}cd and more?", (0,)),
    ("text only", ()),
    ("{}x{}yz", (0, 1)),
    ("again{}!", (1,)),
)
"""A text with the places of its pictures, by their numbers."""

VISION_FAMILIES = tuple(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
EDGE = 224  # of images with a size that the family fixes
SIZES = {
    "max_position_embeddings": 8192,
    "depth": 2,
    "image_size": EDGE,
    "window_size": 112,
}
SIZES |= {"out_hidden_size": 128, "embed_dim": 64}
# Their tiles are multiples of it.
EDGES = {"llava_next": 336, "llava_next_video": 336, "llava_onevision": 384}
CHANGES = {"vipllava": {"vision_feature_layers": [-1, -2]}}
LIKE = {
    "cosmos3_omni": "qwen3_vl",
    "fast_vlm": "llava",
    "glm4v_moe": "glm4v",
    "glm_ocr": "glm46v",
    "glmga": "glm46v",
    "qwen3_vl_moe": "qwen3_vl",
    "shieldgemma2": "gemma3",
}
"""Types that transformers lists without processors of their own, and whose they use."""
LITERAL = re.compile(r"""["'](<[^"'\s{}]{1,40}>|\[[A-Z_]+\])["']""")
# Tokens that vLLM looks up around images.
LINES = {"gemma3": ("\n", "\n\n", "\n\n\n", "\n\n\n\n")}
NAMED = re.compile(r"tokenizer\.(\w+_token)\b")


def build(model_type: str, folder: Path) -> Outcome:
    """Save a random model of the family, its processor and its own answers. Whether that is possible, and why
    not.
    """
    if model_type in IMAGES_SEE_AHEAD:
        return Outcome("refused", reason="within an image it attends to later tokens")
    try:
        if model_type in BUILDERS:
            save_tiny_vision_model(model_type, folder)
        else:
            _save(model_type, folder)
        torch.save((sequences(folder), *own_answers(folder)), folder / EXPECTED)
    except BallastError as error:
        return Outcome("refused", reason=str(error))
    except Exception as error:
        return Outcome("not built", reason=named(error))
    return Outcome("exact")


def _save(model_type: str, folder: Path) -> None:
    torch.manual_seed(0)
    edge = EDGES.get(model_type, EDGE)
    config = tiny_config(model_type, SIZES | {"image_size": edge})
    config.update(CHANGES.get(model_type, {}))
    source = inspect.getsource(importlib.import_module(_model_class(config).__module__))
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for table in (rope, *rope.values()) if "get_rope_index" in source else ():
        if isinstance(table, dict) and "rope_type" in table:
            table["mrope_section"] = _sections(config.get_text_config(), table)
    processor = processor_for(LIKE.get(model_type, model_type), config, edge)
    image = getattr(processor, "image_token_id", None)
    if image is None:
        image = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    for name in ("image_token_id", "image_token_index"):
        if name in vars(config):
            setattr(config, name, image)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).float()
    fill_zeros(model)
    with torch.no_grad():  # large enough that images matter
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _model_class(config: Any) -> Any:
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]


def _sections(text: Any, rope: dict[str, Any]) -> list[int]:
    """Parts of a head's rotary dimensions for time, height and width."""
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    half = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
    return [half - 2 * (half // 3), half // 3, half // 3]


def processor_for(model_type: str, config: Any, pixels_an_edge: int) -> Any:
    """The family's processor, of default sizes, with a tokenizer that has the special tokens its source
    names.
    """
    if (
        model_type not in PROCESSOR_MAPPING_NAMES
        or model_type not in IMAGE_PROCESSOR_MAPPING_NAMES
    ):
        raise LookupError("transformers has no processor for it")
    found = getattr(transformers, PROCESSOR_MAPPING_NAMES[model_type])
    source = inspect.getsource(importlib.import_module(found.__module__))
    special = {"bos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    named = {
        name: f"<{name}>"
        for name in NAMED.findall(source)
        if name not in {"eos_token", "pad_token", *special}
    }
    tower = getattr(config, "vision_config", None)
    patch, merged = (
        getattr(tower, "patch_size", None),
        getattr(tower, "spatial_merge_size", None),
    )
    asked = {"patch_size": patch, "merge_size": merged}
    of_images = _class_of(IMAGE_PROCESSOR_MAPPING_NAMES[model_type])()
    for name, value in asked.items():
        if isinstance(value, int) and isinstance(getattr(of_images, name, None), int):
            setattr(of_images, name, value)
    for name in ("size", "crop_size", "max_image_size"):
        for edge, pixels in dict(getattr(of_images, name, None) or {}).items():
            if pixels < 2000:  # others are areas
                getattr(of_images, name)[edge] = pixels_an_edge
    literals = dict.fromkeys((*LITERAL.findall(source), *LINES.get(model_type, ())))
    parts = {
        "image_processor": of_images,
        "tokenizer": byte_tokenizer(literals, named, **special),
    }
    takes = inspect.signature(found.__init__).parameters
    if "video_processor" in takes and model_type in VIDEO_PROCESSOR_MAPPING_NAMES:
        parts["video_processor"] = _class_of(VIDEO_PROCESSOR_MAPPING_NAMES[model_type])()
    if "feature_extractor" in takes and model_type in FEATURE_EXTRACTOR_MAPPING_NAMES:
        parts["feature_extractor"] = _class_of(
            FEATURE_EXTRACTOR_MAPPING_NAMES[model_type]
        )()
    settings = {
        "patch_size": patch,
        "num_image_tokens": (pixels_an_edge // patch) ** 2
        if isinstance(patch, int)
        else None,
        "vision_feature_select_strategy": getattr(
            config, "vision_feature_select_strategy", "default"
        ),
        "num_additional_image_tokens": 1,
        "img_size": pixels_an_edge,
        "downsample_factor": getattr(config, "downsample_factor", 1),
    }
    made = found(
        **parts, **{name: value for name, value in settings.items() if name in takes}
    )
    if not hasattr(made, "image_token"):
        raise ConfigError(f"{found.__name__} has no image token")
    return made


def _class_of(names: Any) -> Any:
    """A class by its name, or by those of a processor's kinds."""
    if isinstance(names, dict):
        names = names.get("torchvision") or names["pil"]
    return getattr(transformers, names if isinstance(names, str) else names[-1])


def sequences(folder: Path) -> DataProto:
    """The texts, expanded as a run does. All tokens but the first of each are predicted."""
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    placeholders = Placeholders(processor, str(folder))
    images = [
        Image(digest_of(picture), *picture.size, png_of(picture)) for picture in pictures()
    ]
    rows, placed = [], []
    for text, numbers in TEXTS:
        ids = processor.tokenizer(
            _shown(processor, text), add_special_tokens=False, return_tensors="np"
        )["input_ids"][0]
        expanded, places = placeholders.expand(
            ids, [images[number] for number in numbers], "a text"
        )
        rows.append(
            {
                "input_ids": torch.from_numpy(expanded).long(),
                "loss_mask": torch.arange(len(expanded)) > 0,
            }
        )
        placed.append(places)
    batch = DataProto.from_list(rows)
    batch.objects["images"] = object_column(placed)
    return batch


def own_answers(folder: Path) -> tuple[Tensor, Tensor]:
    """(log-probs of all tokens, gradient of their mean at the embedding), by transformers alone."""
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    shown, parts = pictures(), []
    for text, numbers in TEXTS:
        given = {"images": [[shown[number] for number in numbers]]} if numbers else {}
        text = _shown(processor, text)
        inputs = processor(
            text=[text], return_tensors="pt", add_special_tokens=False, **given
        )
        if "token_type_ids" in processor.model_input_names:
            inputs.setdefault("token_type_ids", torch.zeros_like(inputs["input_ids"]))
        logits = model(**inputs, use_cache=False).logits[0, :-1]
        picked = (
            logits.log_softmax(-1).gather(1, inputs["input_ids"][0, 1:, None]).squeeze(1)
        )
        parts.append(torch.cat([logits.new_zeros(1), picked]))
    if not _sees(model, inputs):
        raise ValueError("another image changes nothing")
    log_probs = torch.cat(parts)
    (-log_probs.sum() / (len(log_probs) - len(TEXTS))).backward()
    return log_probs.detach(), model.get_input_embeddings().weight.grad


def _sees(model: Any, inputs: Any) -> bool:
    """Whether the last text's log-probs depend on its picture."""
    given = [
        {**inputs, "pixel_values": inputs["pixel_values"] * factor}
        for factor in (1.0, -1.0)
    ]
    with torch.no_grad():
        first, other = (
            model(**each, use_cache=False).logits[0, -1].log_softmax(-1) for each in given
        )
    return bool((first - other).abs().max() > 100 * TOLERANCE)


def _shown(processor: Any, text: str) -> str:
    return text.replace("{}", processor.image_token)
