"""The FLOPs and parameters of a vision tower that plans and memory pages count from config.json."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from balancing.cost_model import image_flops
from tests.workers.vision_families import EXACT, PLACEHOLDERS, pictures
from workers.config.roles import ModelConfig, ParallelConfig
from workers.model.memory.memory_trace import Role, _sizes

NOT_FEATURES = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@pytest.mark.parametrize("family", EXACT)
def test_a_towers_flops_are_counted_from_its_config(
    vision_model: Callable[[str], Path], family: str
) -> None:
    path = vision_model(family)
    config = AutoConfig.from_pretrained(path)
    processor = AutoProcessor.from_pretrained(path)
    with torch.random.fork_rng():
        model = AutoModelForImageTextToText.from_config(
            config, attn_implementation="eager"
        ).eval()
    given = processor(
        text=[PLACEHOLDERS[family]], images=[pictures()[:1]], return_tensors="pt"
    )
    token = getattr(config, "image_token_id", None) or config.image_token_index
    tokens = int((given["input_ids"] == token).sum())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.base_model.get_image_features(
            **{k: v for k, v in given.items() if k not in NOT_FEATURES}
        )
    linear, quadratic, patches = image_flops(config.to_dict())
    assert linear * tokens + quadratic * tokens**2 == pytest.approx(
        counter.get_total_flops(), rel=0.15
    )
    assert patches * tokens == pytest.approx(_patches(given, config), rel=0.1)


def _patches(given: dict[str, torch.Tensor], config: AutoConfig) -> int:
    if "image_grid_thw" in given:
        return int(given["image_grid_thw"].prod())
    *_, height, width = given["pixel_values"].shape
    side = config.vision_config.patch_size
    side = side[0] if isinstance(side, (list, tuple)) else side
    return (
        given["pixel_values"].numel()
        // (3 * height * width)
        * (height // side)
        * (width // side)
    )


@pytest.mark.parametrize("trains", [False, True])
def test_a_frozen_tower_is_not_counted_as_trained(
    vision_model: Callable[[str], Path], trains: bool
) -> None:
    description = json.loads((vision_model("llava") / "config.json").read_text())
    model = ModelConfig(path="", train_vision=trains)
    role = Role(
        description,
        model,
        "lm",
        True,
        {},
        cpu_offload=False,
        optimizer_offload=False,
        optimizer={},
    )
    sizes = _sizes(role, ParallelConfig(), longest=100)
    frozen = sizes["parameters"] - sizes["trained"]
    assert frozen == 0 if trains else 0 < frozen < sizes["trained"]
