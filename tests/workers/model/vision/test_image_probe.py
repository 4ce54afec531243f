"""At load models are compared with images too: exact families pass, and what images would make wrong is
refused.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.refusals import refused
from tests.workers.model.test_numerics_check import refusal
from tests.workers.vision_families import EXACT, pictures
from workers.batch.placed_images import Image
from workers.config.roles import ModelConfig, ParallelConfig
from workers.errors import UnsupportedModelError
from workers.images.images import digest_of, png_of
from workers.model.model import PackedCausalLM, load_model
from workers.model.numerics_check import check_numerics
from workers.model.numerics_probe import make_probe
from workers.model.vision import tower as vision
from workers.model.vision.processor import load_placeholders
from workers.model.vision.tower import Features, Vision

FLOAT32 = torch.float32
FOUR = ("qwen2_5_vl", "qwen3_vl", "llava", "idefics3")


def loaded(
    path: Path, *, trained: bool = False, **settings: Any
) -> tuple[PackedCausalLM, ModelConfig]:
    config = ModelConfig(path=str(path), train_vision=trained, **settings)
    packed = load_model(config, FLOAT32)
    packed.set_trained(True, trained)
    return packed, config


def test_sequences_have_one_image_two_and_none_and_repeat_one(
    vision_model: Callable[[str], Path],
) -> None:
    packed, _ = loaded(vision_model("qwen2_5_vl"))
    probe = make_probe(packed, FLOAT32, prefix=16)
    none, one, two = probe.sequences.objects["images"]
    assert (len(none), len(one), len(two)) == (0, 1, 2)
    assert one[0] == two[0] and one[0].image != two[1].image and one[0].first == 16
    rows = [probe.sequences.row(index)["input_ids"] for index in range(3)]
    shared = one[0].first + one[0].tokens
    assert rows[1][:shared].equal(rows[2][:shared])
    for row, images in zip(rows, (none, one, two), strict=True):
        places = (row == packed.vision.image_token).nonzero().flatten().tolist()
        assert places == [
            place
            for each in images
            for place in range(each.first, each.first + each.tokens)
        ]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((family, "packed") for family in EXACT),
        ("qwen2_5_vl", "padded"),
        ("idefics3", "padded"),
    ],
)
def test_families_are_exact_with_images(
    vision_model: Callable[[str], Path], family: str, layout: str
) -> None:
    found = check_numerics(*loaded(vision_model(family), layout=layout))
    assert 0 < found.largest < 2e-5 and 0 < found.gradient < 1e-5


@pytest.mark.parametrize("family", FOUR)
def test_a_trained_tower_is_probed_by_a_gradient_of_its_own(
    vision_model: Callable[[str], Path], family: str
) -> None:
    packed, config = loaded(vision_model(family), trained=True, share_prefixes="always")
    text, tower = make_probe(packed, FLOAT32).parameters
    assert text not in packed.vision.names and tower in {
        f"model.{name}" for name in packed.vision.names
    }
    assert 0 < check_numerics(packed, config).gradient < 1e-5


def plain_positions(self: Vision, ids: torch.Tensor, images: object) -> torch.Tensor:
    return torch.arange(len(ids)).expand(3, -1)


def reversed_inputs(self: Vision, images: list[Any]) -> Any:
    return right_inputs(self, images[::-1])


def without_deepstack(self: Vision, inputs: Any, dtype: torch.dtype) -> Features:
    return replace(right_features(self, inputs, dtype), deepstack=())


def detached(self: Vision, inputs: Any, dtype: torch.dtype) -> Features:
    found = right_features(self, inputs, dtype)
    return Features(found.embeds.detach(), tuple(each.detach() for each in found.deepstack))


right_inputs, right_features = vision.Vision.inputs, vision.Vision.features


@pytest.mark.parametrize(
    ("family", "method", "wrong", "message"),
    [
        ("qwen2_5_vl", "positions", plain_positions, "log-probs differ"),
        ("llava", "inputs", reversed_inputs, "log-probs differ"),
        ("qwen3_vl", "features", without_deepstack, "log-probs differ"),
        ("idefics3", "features", detached, "the gradient of"),
    ],
)
def test_what_images_make_wrong_is_refused(
    vision_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    method: str,
    wrong: Callable[..., Any],
    message: str,
) -> None:
    packed, config = loaded(vision_model(family), trained=True)
    monkeypatch.setattr(Vision, method, wrong)
    with refused(message, UnsupportedModelError):
        check_numerics(packed, config)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(),
        ParallelConfig(context_parallel=2),
        pytest.param(
            ParallelConfig(context_parallel=2, context_parallel_method="ring"),
            marks=pytest.mark.slow,
        ),
        pytest.param(ParallelConfig(tensor_parallel=2), marks=pytest.mark.slow),
    ],
    ids=["shards", "ulysses", "ring", "tensor parallel"],
)
def test_engines_over_ranks_pass_the_check_with_images(
    ranks: Any, vision_model: Callable[[str], Path], parallel: ParallelConfig
) -> None:
    options = {"parallel": parallel, "train_vision": True}
    assert ranks.run(refusal, 2, str(vision_model("qwen3_vl")), options) == ["", ""]


def test_gemma_3_is_exact_as_text_and_refuses_images_by_name(
    vision_model: Callable[[str], Path],
) -> None:
    path = vision_model("gemma3")
    packed, config = loaded(path)
    assert packed.vision is None and 0 < check_numerics(packed, config).largest < 2e-5
    assert_images_refused(path, "(gemma3)")


def assert_images_refused(path: Path, named: str) -> None:
    placeholders, ids, picture = load_placeholders(str(path)), np.arange(5), pictures()[0]
    assert placeholders is not None and placeholders.expand(ids, (), "a record")[0] is ids
    with refused(named):
        placeholders.expand(
            ids, [Image(digest_of(picture), *picture.size, png_of(picture))], "a record"
        )


def test_without_a_processor_text_is_proved_and_images_are_refused(
    vision_model: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(vision_model("llava") / name, tmp_path)
    packed, config = loaded(tmp_path)
    assert 0 < check_numerics(packed, config).largest < 2e-5
    assert packed.vision is not None
    with refused(f"model.path={tmp_path} has no processor"):
        packed.vision.inputs([])
    assert_images_refused(tmp_path, "its processor cannot be loaded")
