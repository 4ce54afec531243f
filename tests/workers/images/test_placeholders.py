"""Placeholders expand to what transformers' whole processor reads."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.refusals import refused
from tests.workers.vision_families import EXACT, PLACEHOLDERS, pictures
from workers.errors import ConfigError, DataError
from workers.images.images import ImageSource
from workers.images.placeholders import Placeholders, spread
from workers.model.vision.processor import load_placeholders


def _expander(folder: Path) -> Placeholders:
    found = load_placeholders(str(folder))
    assert found is not None
    return found


def _ids(found: Placeholders, text: str) -> np.ndarray:
    return np.asarray(
        found._processor.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32
    )


@pytest.mark.parametrize("family", EXACT)
def test_expanded_ids_are_those_of_the_whole_processor(
    family: str, vision_model: Callable[[str], Path]
) -> None:
    found, marker, images = (
        _expander(vision_model(family)),
        PLACEHOLDERS[family],
        pictures(),
    )
    text = f"ab {marker} x{marker}{marker}\n yz"
    ids, placed = found.expand(
        _ids(found, text), [ImageSource(i, "record 1").image() for i in images], "record 1"
    )
    whole = found._processor(text=[text], images=[images], add_special_tokens=False)[
        "input_ids"
    ][0]
    assert ids.tolist() == list(whole)
    outside = spread(np.ones(len(_ids(found, text)), bool), placed)
    assert found.id not in ids[outside]
    assert ids[outside].tolist() == [
        token for token in _ids(found, text).tolist() if token != found.id
    ]
    for each, image in zip(placed, images, strict=True):
        assert (each.image.width, each.image.height) == image.size
        assert found.id in ids[each.first : each.first + each.tokens]
        assert not outside[each.first : each.first + each.tokens].any()


def test_each_image_needs_its_place(vision_model: Callable[[str], Path]) -> None:
    found = _expander(vision_model("qwen2_5_vl"))
    image = ImageSource(pictures()[0], "record 1").image()
    for text, images in (
        ("ab", [image]),
        (PLACEHOLDERS["qwen2_5_vl"], []),
        (PLACEHOLDERS["qwen2_5_vl"], [image] * 2),
    ):
        with refused(f"{len(images)} images", DataError):
            found.expand(_ids(found, text), images, "record 1")


def test_a_family_that_expands_by_content_is_refused(
    vision_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as crops where an image has something to see: a blank image of that size has fewer tokens."""
    found = _expander(vision_model("llava"))
    whole, image = found._whole, ImageSource(pictures()[0], "record 1").image()
    monkeypatch.setattr(
        found,
        "_whole",
        lambda text, images, where: whole(text + "!" * ("Look" in text), images, where),
    )
    with refused("LlavaProcessor", ConfigError):
        found.expand(_ids(found, "<image>"), [image], "record 1")


def test_text_models_read_no_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_placeholders(str(tmp_path)) is None
