"""Given sequences with images: their tokens are expanded, and none of them is learned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.config import load_as
from controller.config.offline import (
    OfflineConfig,
    PreferencesConfig,
    RewardTrainingConfig,
    SftConfig,
)
from controller.offline.datasets import SequenceDataset
from controller.offline.offline_training import _examples_of, _read_examples
from tests.refusals import refused
from tests.workers.vision_families import pictures
from workers.batch.remote_batch import IMAGES
from workers.errors import DataError
from workers.images.images import digest_of, read_image
from workers.model.pretrained import load_tokenizer
from workers.model.vision.processor import load_placeholders
from workers.rendering import Renderer

PART, TEXT = {"type": "image"}, {"type": "text", "text": "How many?"}
ASKED = [{"role": "user", "content": [PART, TEXT]}]


def _said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, image in zip("abc", pictures(), strict=True):
        image.save(tmp_path / f"{name}.png")
    return tmp_path


@pytest.fixture(scope="module")
def renderer(vision_model: Callable[[str], Path]) -> Renderer:
    path = str(vision_model("qwen2_5_vl"))
    return Renderer(load_tokenizer(path), placeholders=load_placeholders(path))


def _dataset(
    schema: type[OfflineConfig], folder: Path, renderer: Renderer, *records: dict[str, Any]
) -> SequenceDataset:
    path = str(folder / "train.jsonl")
    config: Any = load_as(
        schema, None, ["model.path=model", f"data.train={path}", "resources.device=cpu"]
    )
    examples = [
        _examples_of(config, record, path, f"record {n}")
        for n, record in enumerate(records, start=1)
    ]
    return SequenceDataset(examples, renderer, config.data, name=path, shuffle=False)


SCHEMAS: dict[type[OfflineConfig], dict[str, Any]] = {
    SftConfig: {"prompt": "<image>How many?", "response": "two"},
    PreferencesConfig: {"prompt": "How many?", "chosen": "<image>two", "rejected": "ten"},
    RewardTrainingConfig: {
        "prompt": [{"role": "user", "content": "<image>How many?"}],
        "chosen": _said("two"),
        "rejected": _said("ten"),
    },
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_images_that_the_model_would_not_see_are_named(
    schema: type[OfflineConfig], folder: Path, vision_model: Callable[[str], Path]
) -> None:
    path, model = folder / "train.jsonl", vision_model("qwen2_5_vl")
    config = load_as(
        schema, None, [f"model.path={model}", f"data.train={path}", "resources.device=cpu"]
    )
    record = SCHEMAS[schema] | {"image": "a.png"}
    path.write_text(json.dumps(record))
    with refused("data.image_key to 'image'", DataError):
        _read_examples(config)
    path.write_text(json.dumps(record).replace("<image>", ""))
    _, _, warnings = _read_examples(config)
    assert any("data.image_key" in line and "'image'" in line for line in warnings)


def test_conversations_and_responses_with_images(
    folder: Path, renderer: Renderer, ray_session: None
) -> None:
    records = [
        {"messages": [*ASKED, *_said("two")], "images": ["a.png"]},
        {
            "messages": [
                {"role": "user", "content": [PART | {"image": "a.png"}, TEXT]},
                *_said("two"),
            ]
        },
        {"prompt": ASKED, "response": "two", "images": ["a.png"]},
        {
            "prompt": [{"role": "user", "content": "<image>How many?"}],
            "response": _said("two"),
            "images": ["a.png"],
        },
        {"prompt": [{"role": "user", "content": "How many?"}], "response": "two"},
    ]
    batch = _dataset(SftConfig, folder, renderer, *records).first(0).gather()
    *rows, plain = [batch.row(row) for row in range(len(batch))]
    for row, images in zip(rows, batch.objects[IMAGES], strict=False):
        assert row["input_ids"].tolist() == rows[0]["input_ids"].tolist()
        (placed,) = images
        span = slice(placed.first, placed.first + placed.tokens)
        assert set(row["input_ids"][span].tolist()) == {renderer.placeholders.id}  # type: ignore[union-attr]
        assert not row["loss_mask"][span].any()
        assert digest_of(read_image(placed.image.data, "an image")) == digest_of(
            pictures()[0]
        )
        learned, expected = (
            each["input_ids"][each["loss_mask"]].tolist() for each in (row, plain)
        )
        assert learned == expected
    assert batch.objects[IMAGES][-1] == ()


def test_pairs_share_as_far_as_their_images_are_equal(
    folder: Path, renderer: Renderer, ray_session: None
) -> None:
    def asked(name: str) -> list[dict[str, Any]]:
        system = {"role": "system", "content": "Count."}
        return [system, {"role": "user", "content": [PART | {"image": name}, TEXT]}]

    shared = {"prompt": ASKED, "chosen": "two", "rejected": "ten", "images": ["a.png"]}
    other = {
        "chosen": [*asked("a.png"), *_said("two")],
        "rejected": [*asked("x.png"), *_said("two")],
    }
    pictures()[0].rotate(180).save(folder / "x.png")
    found = _dataset(PreferencesConfig, folder, renderer, shared, other).first(0)
    same, differs = found["prompt_tokens"].tolist()[::2]
    images = found[IMAGES]
    assert images[0][0].image.data is images[1][0].image.data
    assert images[2][0].image.digest != images[3][0].image.digest
    assert differs == images[2][0].first < images[2][0].first + images[2][0].tokens < same


def test_a_bad_image_costs_its_record(folder: Path, renderer: Renderer) -> None:
    bad, good = (
        {"prompt": ASKED, "response": "two", "images": [name]}
        for name in ("gone.png", "a.png")
    )
    found = _dataset(SftConfig, folder, renderer, bad, good)
    assert len(found) == 1 and "record 1" in found.warnings[0]
    with refused("gone.png", DataError):
        _dataset(SftConfig, folder, renderer, bad)
    assert np.array_equal(found.lengths, [len(found._items[0][0][0]["input_ids"])])
