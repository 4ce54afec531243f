"""A real engine with images: it computes what the trainer does, before and after updates.

Only here are log-probs of images compared with a trainer's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import ray
import torch

from controller.engines.engine_pool import Sample
from tests.workers.rollout import tiny
from tests.workers.rollout.engines import (
    LOG_PROB_TOLERANCE,
    Engines,
    rows_of,
    trainer_difference,
    trainer_of,
)
from tests.workers.vision_families import PLACEHOLDERS, pictures
from workers.batch.placed_images import Image, Placed, PlacedImage
from workers.engine.image_inputs import _place
from workers.engine.requests import EpisodeStart, Response, SampleRequest, sample_seed
from workers.engine.weights.weight_transfer import pack_weights
from workers.errors import DataError, RolloutError
from workers.images.images import digest_of, png_of
from workers.images.placeholders import Placeholders
from workers.model.engine import TrainingEngine
from workers.model.vision.processor import load_placeholders

SAMPLES = 3
# Texts with I for an image, longer than a block of the engine's cache, and which images.
PROMPTS = (
    ("count the dots of this image, " * 2 + "I please: ", (0,)),
    ("count the dots of this image, " * 2 + "I please: ", (1,)),
    ("count the dots of this image, " * 2 + "I please: ", (0,)),
    ("I or I, which has more dots? ", (1, 2)),
    ("I and I, are they equal? ", (0, 0)),
    ("no image at all", ()),
)


def image(number: int) -> Image:
    picture = pictures()[number]
    return Image(digest_of(picture), *picture.size, png_of(picture))


@dataclass
class Setup:
    """Engines of a family, and a trainer that follows them."""

    family: str
    path: Path
    engines: Engines

    @cached_property
    def trainer(self) -> TrainingEngine:
        return trainer_of(self.path, train_vision=True)

    @cached_property
    def placeholders(self) -> Placeholders:
        placeholders = load_placeholders(str(self.path))
        assert placeholders is not None
        return placeholders

    def expand(self, text: str, chosen: Sequence[int]) -> tuple[np.ndarray, Placed]:
        """Ids of a prompt, with images in the object store."""
        ids = self.engines.tokenizer(text, add_special_tokens=False)["input_ids"]
        expanded, placed = self.placeholders.expand(
            np.array(ids, np.int32), [image(number) for number in chosen], "a test"
        )
        return expanded, tuple(
            replace(each, image=replace(each.image, data=ray.put(each.image.data)))
            for each in placed
        )

    def requests(self, step: int) -> list[SampleRequest]:
        requests = []
        for prompt, (text, chosen) in enumerate(PROMPTS):
            ids, placed = self.expand(text.replace("I", PLACEHOLDERS[self.family]), chosen)
            for sample in range(SAMPLES):
                seed = sample_seed(0, step, f"p{prompt}", sample)
                request = SampleRequest(f"p{prompt}", sample, ids, seed, images=placed)
                requests.append(request)
        return requests

    def sample(self, step: int) -> list[Sample]:
        return self.engines.sample(self.requests(step), max_new_tokens=12)

    def difference(self, finished: list[Sample], behind: int = 0) -> float:
        rows = [row for _, row in rows_of(finished)]
        images = [result.images for result, _ in finished]
        return trainer_difference(self.trainer, rows, images, behind)

    def change(self, chosen: Callable[[str], bool]) -> None:
        """Change the trainer's weights."""
        with torch.no_grad():
            for name, parameter in self.trainer.module.model.named_parameters():
                if chosen(name):
                    parameter.add_(torch.randn_like(parameter) * 0.05)

    def send(self, left_out: Callable[[str], bool] = lambda name: False) -> None:
        weights = (
            (name, weight)
            for name, weight in self.trainer.named_weights()
            if not left_out(name)
        )
        self.engines.pool.update_weights(
            ray.put(pack_weights(weights)), self.engines.version + 1
        )
        self.engines.version += 1


def of_tower(name: str) -> bool:
    return any(part in name for part in ("visual", "vision", "projector", "connector"))


EPISODES: dict[str, Any] = {"max_turns": 3, "max_episode_tokens": 180}
FAMILIES = [
    "qwen2_5_vl",
    *(
        pytest.param(family, marks=pytest.mark.slow)
        for family in ("qwen3_vl", "llava", "idefics3")
    ),
]


@pytest.fixture(scope="module", params=FAMILIES)
def setup(
    ray_session: None, vision_model: Callable[[str], Path], request: pytest.FixtureRequest
) -> Iterator[Setup]:
    """One engine a family, of a run that trains the tower."""
    path = vision_model(request.param)
    engines = Engines(
        path, environment=cloudpickle.dumps(tiny.Zoom), train_vision=True, **EPISODES
    )
    yield Setup(request.param, path, engines)
    engines.pool.stop()


def test_engines_compute_what_the_trainer_does_before_and_after_updates(
    setup: Setup,
) -> None:
    found = setup.sample(0)
    assert setup.difference(found) < LOG_PROB_TOLERANCE
    hashes = [result.prompt_hash for result, _ in found[::SAMPLES]]
    assert hashes[0] == hashes[2] and len(set(hashes)) == len(PROMPTS) - 1
    assert [len(result.images) for result, _ in found[::SAMPLES]] == [
        len(chosen) for _, chosen in PROMPTS
    ]
    setup.change(lambda name: True)
    with pytest.raises(RolloutError, match="brought nothing"):
        setup.send(left_out=of_tower)
    setup.send()
    again = setup.sample(1)
    assert setup.difference(again) < LOG_PROB_TOLERANCE
    # Keys and values of requests in flight are kept, those of images are not.
    setup.engines.call("keep_caches", 5)
    setup.change(of_tower)
    assert setup.difference(again) > 100 * LOG_PROB_TOLERANCE
    setup.send()
    assert setup.difference(setup.sample(2)) < LOG_PROB_TOLERANCE


def test_a_frozen_tower_is_not_sent_and_stays(setup: Setup) -> None:
    setup.send()
    names = {name for name, _ in setup.trainer.named_weights()}
    frozen = trainer_of(setup.path)
    assert {name for name, _ in frozen.named_weights()} == {
        name for name in names if not of_tower(name)
    }
    assert frozen.weights_metadata().keys() == {name for name, _ in frozen.named_weights()}
    # Colocated engines get it again, because their sleep drops it.
    assert {name for name, _ in frozen.named_weights(frozen_tower=True)} == names
    assert frozen.weights_metadata(frozen_tower=True).keys() == names
    setup.engines.call("freeze_vision", True)
    setup.change(lambda name: not of_tower(name))
    setup.send(left_out=of_tower)
    assert setup.difference(setup.sample(3)) < LOG_PROB_TOLERANCE
    with pytest.raises(RolloutError, match="brought nothing"):
        setup.send(left_out=lambda name: of_tower(name) or "layers.0" in name)
    setup.engines.call("freeze_vision", False)
    # Other tests sample from these engines, which have no weights after a refused update.
    setup.send()


def test_a_sampled_placeholder_is_a_token(setup: Setup) -> None:
    setup.send()
    placeholder = setup.placeholders.id
    requests = setup.requests(4)
    found = setup.engines.sample(requests, max_new_tokens=9, logit_bias={placeholder: 8.0})
    begun, names = [], ("input_ids", "rollout_log_probs", "weight_versions")
    for _, row in rows_of(found):
        begun.append(Response(*(row[name][row["loss_mask"]] for name in names)))
    assert sum(int(np.sum(each.ids == placeholder)) for each in begun) > 20
    continued = [
        replace(request, begun=each) for request, each in zip(requests, begun, strict=True)
    ]
    after = setup.engines.sample(continued, max_new_tokens=20)
    assert setup.difference(after, behind=9) < LOG_PROB_TOLERANCE


def test_every_turn_sees_the_images_of_its_observations(setup: Setup) -> None:
    """The prompt has an image, the opening another, the answers to the first two turns have two and one."""
    setup.send()
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "look: "}, {"type": "image"}]}
    ]
    tokenizer = setup.engines.tokenizer
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expanded, placed = setup.expand(text, [0])
    start = EpisodeStart({"shown": pictures()}, chat, image_key="images")
    requests = [
        SampleRequest(
            "turns", n, expanded, sample_seed(0, 5, "turns", n), start, images=placed
        )
        for n in range(4)
    ]
    every = list(range(len(tokenizer)))  # a turn is one token
    found = setup.engines.sample(requests, max_new_tokens=250, stop_token_ids=every)
    assert [(result.turns, result.environment.failure) for result, _ in found] == [
        (3, "")
    ] * 4
    shown = [image(number).digest for number in (0, 0, 2, 0, 1)]
    assert [[each.image.digest for each in result.images] for result, _ in found] == [
        shown
    ] * 4
    assert setup.difference(found) < LOG_PROB_TOLERANCE


def test_embeddings_go_to_placeholders_within_an_image() -> None:
    """Separators around and between them, and equal tokens elsewhere, are tokens."""
    ids = np.array([9, 7, 1, 9, 9, 2, 9, 9, 1, 9], np.int32)
    placed = PlacedImage(Image(5, 640, 480, b""), first=2, tokens=7)
    place = _place(ids, placed, token=9, tokens=4)
    assert (place.offset, place.length, place.get_num_embeds()) == (3, 5, 4)
    assert place.is_embed.tolist() == [True, True, False, True, True]
    assert (
        _place(ids, replace(placed, first=3, tokens=2), token=9, tokens=2).is_embed is None
    )
    with pytest.raises(DataError, match="640 x 480"):
        _place(ids, placed, token=9, tokens=5)
