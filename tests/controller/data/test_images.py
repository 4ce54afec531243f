"""Records with images become prompts with images, in every form that users bring."""

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from controller.data.prompts import PromptDataset, PromptRules
from controller.data.records import read_records
from tests.json_lines import write_lines
from tests.refusals import refused
from tests.workers.vision_families import PLACEHOLDERS, pictures
from workers.errors import DataError
from workers.images.images import digest_of, read_image
from workers.model.pretrained import load_tokenizer
from workers.model.vision.processor import load_placeholders
from workers.rendering import Renderer

FAMILY = "qwen2_5_vl"
RULES = PromptRules("prompt", max_prompt_tokens=64, image_key="images")
PART, TEXT = {"type": "image"}, {"type": "text", "text": "How many?"}


@pytest.fixture(scope="module")
def renderer(vision_model: Callable[[str], Path]) -> Renderer:
    path = str(vision_model(FAMILY))
    return Renderer(load_tokenizer(path), placeholders=load_placeholders(path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, image in zip("abc", pictures(), strict=True):
        image.save(tmp_path / f"{name}.png")
    return tmp_path


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _dataset(
    folder: Path, renderer: Renderer, *records: dict[str, Any], rules: PromptRules = RULES
) -> PromptDataset:
    file = folder / "train.jsonl"
    write_lines(file, records)
    return PromptDataset(
        read_records(str(file), "prompt", image_key="images"),
        renderer,
        rules,
        name=str(file),
    )


def test_every_form_is_one_prompt(folder: Path, renderer: Renderer) -> None:
    url = (
        "data:image/png;base64,"
        + base64.b64encode((folder / "a.png").read_bytes()).decode()
    )
    forms = [
        {"prompt": _user([PART, TEXT]), "images": ["a.png"]},
        {"prompt": _user([PART, TEXT]), "images": "a.png"},
        {"prompt": _user("<image>How many?"), "images": ["a.png"]},
        {"prompt": _user([PART | {"image": "a.png"}, TEXT])},
        {"prompt": _user([{"type": "image_url", "image_url": {"url": url}}, TEXT])},
    ]
    prompts = list(_dataset(folder, renderer, *forms))
    for prompt in prompts:
        (placed,) = prompt.images
        assert prompt.ids.tolist() == prompts[0].ids.tolist()
        assert (placed.image, placed.first, placed.tokens) == (
            prompts[0].images[0].image,
            *_place(prompts[0]),
        )
        assert prompt.columns["prompt"] == _user([PART, TEXT])
    assert [prompt.columns["images"][0] for prompt in prompts[:1]] == ["a.png 84 x 56"]
    text = f"{PLACEHOLDERS[FAMILY]}How many?"
    (plain,) = _dataset(folder, renderer, {"prompt": text, "images": ["a.png"]})
    whole = renderer.placeholders._processor(
        text=[text], images=[pictures()[:1]], add_special_tokens=False
    )  # type: ignore[union-attr]
    assert plain.ids.tolist() == list(whole["input_ids"][0])


def _place(prompt: Any) -> tuple[int, int]:
    return prompt.images[0].first, prompt.images[0].tokens


def test_parquet_as_datasets_writes_it(folder: Path, renderer: Renderer) -> None:
    content = (folder / "b.png").read_bytes()
    messages = _user([PART | {"text": None}, TEXT])
    table = pa.Table.from_pylist(
        [{"prompt": messages, "images": [{"bytes": content, "path": "b.png"}]}]
    )
    pq.write_table(table, folder / "train.parquet")
    records = read_records(str(folder / "train.parquet"), "prompt", image_key="images")
    (prompt,) = PromptDataset(records, renderer, RULES, name=str(folder / "train.parquet"))
    assert prompt.images[0].image.digest == digest_of(pictures()[1])
    assert prompt.columns["images"] == ["b.png 56 x 112"]


def test_sizes_follow_image_pixels_and_count_as_tokens(
    folder: Path, renderer: Renderer
) -> None:
    record = {"prompt": _user([PART, TEXT]), "images": ["b.png"]}
    (large,) = _dataset(folder, renderer, record)
    (small,) = _dataset(
        folder, renderer, record, rules=replace(RULES, image_pixels=(0, 28 * 56))
    )
    assert (small.images[0].image.width, small.images[0].image.height) == (28, 56)
    assert len(large.ids) - len(small.ids) == 8 - 2  # patches of 28 x 28 pixels
    assert read_image(small.images[0].image.data.open(), "record 1").size == (28, 56)
    short = replace(RULES, max_prompt_tokens=len(large.ids) - 1)
    with refused("data.max_prompt_tokens", DataError):
        _dataset(folder, renderer, record, rules=short)
    with refused("truncate", DataError):
        _dataset(
            folder, renderer, record, rules=replace(short, overlong_prompts="truncate")
        )


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": _user([PART, TEXT]), "images": ["a.png", "b.png"]},
        {"prompt": _user([PART, PART, TEXT]), "images": ["a.png"]},
        {"prompt": _user("How many?"), "images": ["a.png"]},
        {"prompt": _user([PART, TEXT])},
        {"prompt": f"{PLACEHOLDERS[FAMILY]}?"},
    ],
)
def test_images_without_places_are_refused(
    record: dict[str, Any], folder: Path, renderer: Renderer
) -> None:
    with refused("record 1 has", DataError):
        _dataset(folder, renderer, record)


def test_images_are_given_once(folder: Path, renderer: Renderer) -> None:
    with refused("data.image_key", DataError):
        _dataset(
            folder,
            renderer,
            {"prompt": _user([PART | {"image": "a.png"}, TEXT]), "images": ["a.png"]},
        )


def test_a_bad_image_costs_its_record(folder: Path, renderer: Renderer) -> None:
    (folder / "bad.png").write_bytes((folder / "a.png").read_bytes()[:500])
    good, *bad = [
        {"prompt": _user([PART, TEXT]), "images": [name]}
        for name in ("a.png", "bad.png", "gone.png")
    ]
    found = _dataset(folder, renderer, bad[0], good, bad[1])
    assert len(found) == 1 and len(found.unreadable) == 2
    assert "record 1: bad.png" in found.unreadable[0] and "record 3" in found.unreadable[1]
    with refused("bad.png", DataError):
        _dataset(folder, renderer, bad[0])


def test_text_models_refuse_images(folder: Path, renderer: Renderer) -> None:
    with refused("data.image_key", DataError):
        _dataset(
            folder,
            replace(renderer, placeholders=None),
            {"prompt": _user([PART, TEXT]), "images": ["a.png"]},
        )
