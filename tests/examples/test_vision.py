import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoProcessor

from controller import fit
from examples.vision import data, warm_start
from examples.vision.reward import reward

seeds = st.integers(0, 2**32)


def dots_seen(image: Image.Image) -> Counter[str]:
    """Dots by colour: a dot lies within one cell."""
    found: Counter[str] = Counter()
    for x in range(0, image.width, data.CELL):
        for y in range(0, image.height, data.CELL):
            colours = {
                colour
                for _, colour in image.crop(
                    (x, y, x + data.CELL, y + data.CELL)
                ).getcolors()
                or []
            }
            found.update(
                letter for letter, colour in data.COLOURS.items() if colour in colours
            )
    return found


@given(seeds)
def test_the_answer_names_and_counts_the_dots_of_the_picture(seed: int) -> None:
    image, dots = data.picture(random.Random(seed))
    named, _, number = data.solution(dots).partition("=")
    assert Counter(named) == dots_seen(image)
    assert named == "R" * named.count("R") + "G" * named.count("G") + "B" * named.count("B")
    assert int(number) == len(named)


@given(seeds)
def test_a_corrupted_answer_still_counts_the_dots_that_it_names(seed: int) -> None:
    rng = random.Random(seed)
    _, dots = data.picture(rng)
    assert data.corrupted(dots, 0.0, rng) == dots
    named, _, number = data.solution(data.corrupted(dots, 0.3, rng)).partition("=")
    assert int(number) == len(named) <= len(dots)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("RRB=3", 1.0),
        ("RRB=4", 0.5),
        ("RB=2", 1 / 3),
        ("RRGB=4", 3 / 8),
        ("GGG=3", 0.0),
        ("", 0.0),
    ],
)
def test_reward_is_one_for_the_answer_and_half_the_share_of_dots_otherwise(
    response: str, expected: float
) -> None:
    assert reward(response, "RRB=3")["reward"] == pytest.approx(expected)
    assert reward("=0", "=0") == {"reward": 1.0, "exact_match": 1.0}


def test_the_warm_start_goes_from_right_answers_to_some_that_miss_dots(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(warm_start, "STEPS", 20)
    given = list(warm_start.records(tmp_path / "answers", seed=0))
    drawn = [dots_seen(Image.open(tmp_path / record["images"][0])) for record in given]
    right = [
        Counter(record["response"].partition("=")[0]) == dots
        for record, dots in zip(given, drawn, strict=True)
    ]
    clean = round(warm_start.CLEAN_SHARE * len(given))
    assert len(given) == 20 * warm_start.BATCH
    assert all(right[:clean])
    assert 0.3 < sum(right[clean:]) / len(right[clean:]) < 0.7


def test_every_text_has_a_token_and_every_cell_one(tmp_path: Path) -> None:
    warm_start.processor().save_pretrained(tmp_path)
    processor, rng = AutoProcessor.from_pretrained(tmp_path), random.Random(0)
    for _ in range(20):
        image, dots = data.picture(rng)
        messages = [*data.question(), {"role": "assistant", "content": data.solution(dots)}]
        text = processor.apply_chat_template(messages, tokenize=False)
        ids = processor(text=[text], images=[[image]])["input_ids"][0]
        tokens = processor.tokenizer.convert_ids_to_tokens(ids)
        assert "<unk>" not in tokens
        assert tokens.count("<|image_pad|>") == image.width * image.height // data.CELL**2
        assert text.endswith(f"assistant:{data.solution(dots)}<eos>")


def test_its_configuration_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warm_start.create_model(tmp_path / "model", 0)
    overrides = [f"run.dir={tmp_path}", f"model.path={tmp_path / 'model'}"]
    for number, name in enumerate(("train", "validation")):
        data.write(tmp_path / f"{name}.jsonl", 40, seed=number)
        overrides.append(f"data.{name}={tmp_path / name}.jsonl")
    assert (
        fit.main(["--config", "examples/vision/config.yaml", "--dry-run", *overrides]) == 0
    )
    records = [json.loads(line) for line in (tmp_path / "train.jsonl").open()]
    assert len({record["images"][0] for record in records}) == 40
