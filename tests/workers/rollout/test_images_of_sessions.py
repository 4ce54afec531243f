"""Images that agents send, without an engine: their places in prompts, what tells them apart, what is
refused.
"""

import base64
import io
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers import AutoTokenizer

from tests.workers.rollout.image_messages import IMAGES, PIXELS, URLS, asks, image_part
from tests.workers.rollout.sessions import ids, response
from tests.workers.vision_families import pictures
from workers.agents.prompt_renderer import PromptRenderer
from workers.agents.session import Session, SessionPrompt
from workers.agents.session_requests import OpenSession
from workers.batch.placed_images import Image, PlacedImage, keys
from workers.engine.branches import branches_of
from workers.engine.requests import Response
from workers.engine.session_record import Node
from workers.errors import DataError
from workers.image_parts import with_urls
from workers.images.images import decode_image, url_of
from workers.model.vision.processor import load_placeholders
from workers.rendering import Renderer

END = "<|im_end|>"


class Gateway:
    """A session at a gateway whose engine is the test."""

    def __init__(
        self, model: Path, session: Session | None = None, pixels: tuple[int, int] = PIXELS
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.renderer = Renderer(tokenizer, placeholders=load_placeholders(str(model)))
        self.prompts, self.session = (
            PromptRenderer(self.renderer),
            session or Session("s", max_turns=9),
        )
        self.opened = OpenSession(self.session, None, 0, {}, 0, pixels)  # type: ignore[arg-type]

    def read(self, *messages: Any) -> tuple[Any, Response]:
        return self.prompts.read(self.opened, self.prompts.messages(list(messages)), {})

    def turn(self, answer: str, *messages: Any) -> tuple[Node, Response]:
        """Answer a request, from the record where that knows its prompt. Returns the turn and its prompt."""
        asked, prompt = self.read(*messages)
        node = self.session.claim_recorded(asked, prompt.ids, prompt.images)
        if node is None:
            sampled = response(self.renderer.ids(answer + END, "a test"))
            said = {"role": "assistant", "content": answer}
            with self.session.sampling() as number:
                node = self.session.add(
                    asked,
                    prompt.ids,
                    sampled,
                    number=number,
                    message=said,
                    text=answer,
                    images=prompt.images,
                )
        node.received = True
        return node, prompt

    def rendered(self, *messages: Any, images: list[int]) -> Response:
        """The prompt of messages whose images are bare parts."""
        found = self.renderer.prompt_ids(list(messages), "a test")
        whole, placed = self.renderer.expand(
            found, [IMAGES[number] for number in images], "a test"
        )
        return Response(whole, np.zeros(len(whole)), np.zeros(len(whole)), images=placed)


@pytest.fixture
def gateway(vision_model: Callable[[str], Path]) -> Gateway:
    return Gateway(vision_model("qwen2_5_vl"))


def bare(*content: str) -> dict[str, Any]:
    parts = [
        {"type": "image"} if each == "I" else {"type": "text", "text": each}
        for each in content
    ]
    return {"role": "user", "content": parts}


def test_turns_extend_their_ids_and_images(gateway: Gateway) -> None:
    """A second image in the second turn, and two in an answer of a tool."""
    first, second = asks("which? ", 0), asks(1, " or ", "this?")
    node, prompt = gateway.turn("one", first)
    expected = gateway.rendered(bare("which? ", "I"), images=[0])
    assert (prompt.ids.tolist(), prompt.images) == (expected.ids.tolist(), expected.images)
    said = {"role": "assistant", "content": "one"}
    deeper, whole = gateway.turn("two", first, said, second)
    assert deeper.parent == node.number
    expected = gateway.rendered(
        bare("which? ", "I"), said, bare("I", " or ", "this?"), images=[0, 1]
    )
    assert (whole.ids.tolist(), whole.images) == (expected.ids.tolist(), expected.images)
    tool = {"role": "tool", "content": [image_part(URLS[2]), image_part(URLS[0])]}
    last, whole = gateway.turn(
        "three", first, said, second, {"role": "assistant", "content": "two"}, tool
    )
    assert last.parent == deeper.number
    assert [placed.image for placed in whole.images] == [
        IMAGES[number] for number in (0, 1, 2, 0)
    ]
    assert gateway.session.row_images == [whole.images]
    other, _ = gateway.turn("four", first, said, asks(2, " or ", "this?"))
    assert other.parent == node.number
    assert [len(row) for row in gateway.session.row_images] == [5, 4, 2]
    told = json.dumps(gateway.session.describe_turns())
    assert "base64" not in told and f"{IMAGES[2].digest:016x}" in told and len(told) < 4000


def test_images_of_one_size_are_told_apart(vision_model: Callable[[str], Path]) -> None:
    """Ids are equal: the history, the record and the rows' hashes are not."""
    one, other = (Pillow.new("RGB", (84, 56), color) for color in ("red", "blue"))
    messages = [
        [{"role": "user", "content": [image_part(url_of(each))]}] for each in (one, other)
    ]
    found = []
    for mine in messages:
        gateway = Gateway(vision_model("qwen2_5_vl"))
        found.append((gateway, *gateway.turn("a", *mine)))
    (gateway, node, prompt), (second, _, its_prompt) = found
    assert np.array_equal(prompt.ids, its_prompt.ids)
    assert gateway.session.prompt_hash != second.session.prompt_hash
    said = {"role": "assistant", "content": "a"}
    assert gateway.read(*messages[0], said, asks("more"))[0].parent is node
    assert gateway.read(*messages[1], said, asks("more"))[0].parent is None
    record = pickle.loads(pickle.dumps(gateway.session.snapshot()))
    for mine, replayed in ((messages[1], False), (messages[0], True)):
        again = Gateway(
            vision_model("qwen2_5_vl"), Session("s", max_turns=9, record=record)
        )
        assert again.turn("a", *mine)[0].replayed is replayed


def test_every_form_of_an_image_is_the_same_image(gateway: Gateway) -> None:
    forms = [
        {"type": "image_url", "image_url": URLS[0]},
        {"type": "input_image", "image_url": URLS[0], "detail": "auto"},
        {"type": "image", "image": URLS[0]},
        {"type": "image_url", "image_url": {"url": URLS[0], "detail": "low"}},
    ]
    prompts = [gateway.read({"role": "user", "content": [form]})[1] for form in forms]
    assert {prompt.images for prompt in prompts} == {prompts[0].images}
    assert prompts[0].images[0].image == IMAGES[0]
    assert len(gateway.opened.images) == 1  # decoded once
    buffer = io.BytesIO()
    pictures()[0].save(buffer, "WEBP", lossless=True)
    webp = image_part("data:;base64," + base64.b64encode(buffer.getvalue()).decode())
    assert gateway.read({"role": "user", "content": [webp]})[1].images == prompts[0].images


def test_images_are_resized_as_the_data_s_are(vision_model: Callable[[str], Path]) -> None:
    gateway = Gateway(vision_model("qwen2_5_vl"), pixels=(0, 28 * 42))
    (placed,) = gateway.read(asks(0))[1].images
    assert (placed.image.width, placed.image.height) == (42, 28)
    assert placed.image == decode_image(placed.image.data, "a test", (0, 28 * 42))


LOCAL, ELSEWHERE = "LOCAL/here.png", "nothing is fetched or read"
SVG = base64.b64encode(b"<svg/>").decode()


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (image_part(LOCAL), ELSEWHERE),
        (image_part(f"file://{LOCAL}"), ELSEWHERE),
        (image_part("https://example.org/a.png"), ELSEWHERE),
        (image_part(""), ELSEWHERE),
        ({"type": "image", "path": LOCAL}, ELSEWHERE),
        ({"type": "image", "image": {"path": LOCAL}}, ELSEWHERE),
        ({"type": "image", "image": {"bytes": None, "path": LOCAL}}, ELSEWHERE),
        ({"type": "input_image", "file_id": "f"}, ELSEWHERE),
        ({"type": "image"}, ELSEWHERE),
        (image_part("data:image/png;base64,AAAA"), "not an image"),
        (image_part(f"data:image/svg+xml;base64,{SVG}"), "not an image"),
        (image_part(URLS[0][:200]), "image"),
        (image_part("data:image/png;base64,\ud800"), "image"),
        ({"type": "image_pil", "image_pil": URLS[0]}, "image_pil"),
        ({"type": "text", "text": "<|image_pad|>"}, "0 images, and 1 places"),
    ],
)
def test_what_is_no_image_in_the_request_is_refused(
    gateway: Gateway, tmp_path: Path, image: dict[str, Any], said: str
) -> None:
    """Files of this machine are not read, though they are images."""
    pictures()[0].save(tmp_path / "here.png")
    image = json.loads(json.dumps(image).replace("LOCAL", str(tmp_path)))
    with pytest.raises(DataError, match=said):
        gateway.read({"role": "user", "content": [image]})
    assert gateway.session.known == 0 and gateway.opened.images == {}


def test_a_model_of_text_refuses_images(gateway: Gateway) -> None:
    gateway.renderer.placeholders = None
    with pytest.raises(DataError, match="does not read"):
        gateway.read(asks(0))
    assert gateway.opened.images == {}


def test_a_record_s_images_come_back_as_they_were(gateway: Gateway) -> None:
    """What the agent passes on has the digest of the record's image, so that rows share the prompt."""
    prompt = [bare("I", " or ", "I", "?"), {"role": "user", "content": "more"}]
    data = [image.data for image in (IMAGES[0], IMAGES[1])]
    record = with_urls(
        {"chat": prompt, "images": ["a", "b"], "answer": 1}, "chat", "images", data
    )
    assert json.loads(json.dumps(record)) == record and record["answer"] == 1
    assert record["images"] == [
        part["image_url"]["url"] for part in record["chat"][0]["content"][::2]
    ]
    found = gateway.read(*record["chat"])[1]
    expected = gateway.rendered(*prompt, images=[0, 1])
    assert (found.ids.tolist(), found.images) == (expected.ids.tolist(), expected.images)
    assert with_urls({"chat": "I?", "images": ["a"]}, "chat", "images", data[:1]) == {
        "chat": "I?",
        "images": record["images"][:1],
    }


def shown(digests: list[int], start: int) -> tuple[PlacedImage, ...]:
    """Images of 3 tokens each behind a token at `start`."""
    return tuple(
        PlacedImage(Image(digest, 28, 28, b"x"), start + 1 + 3 * n, 3)
        for n, digest in enumerate(digests)
    )


@given(
    st.lists(
        st.tuples(st.integers(-1, 5), st.lists(st.integers(0, 2), max_size=2)),
        min_size=1,
        max_size=6,
    )
)
def test_rows_of_any_tree_hold_the_images_of_their_paths(
    turns: list[tuple[int, list[int]]],
) -> None:
    """Images have equal ids: keys alone tell which one a row shows. A record answers the same
    images alone.
    """
    session, nodes, meanings = (
        Session("s", max_turns=9),
        list[Node](),
        dict[int, list[int]](),
    )
    for number, (place, chosen) in enumerate(turns):
        parent = nodes[place % number] if place >= 0 and number else None
        before, new = session.whole(parent), ids([7] + [9, 9, 9] * len(chosen))
        images = (*before.images, *shown(chosen, len(before.ids)))
        prompt = np.concatenate([before.ids, new])
        node = session.add(
            SessionPrompt([], parent=parent),
            prompt,
            response([100 + number]),
            number=number,
            images=images,
        )
        node.received = True
        assert session.whole(node).images == images
        nodes.append(node)
        above = meanings[parent.number] if parent else []
        meanings[number] = [*above, *keys(new, shown(chosen, 0)).tolist(), 100 + number]
    rows, images_of_rows = session.rows(), session.row_images
    found = [
        keys(row["input_ids"], images).tolist()
        for row, images in zip(rows, images_of_rows, strict=True)
    ]
    assert found[-len(session.leaves) :] == [
        meanings[leaf.number] for leaf in session.leaves
    ]
    branches = branches_of(rows, session.prompt_tokens, images_of_rows)
    assert [branch.images for branch in branches] == images_of_rows[1:]
    again = Session("s", max_turns=9, record=pickle.loads(pickle.dumps(session.snapshot())))
    for node in nodes:
        whole = session.whole(node)
        asked = SessionPrompt(
            [],
            parent=again.path(again.nodes[node.parent])[-1] if node.parent >= 0 else None,
        )
        prompt = whole.ids[:-1]
        if node.images:
            others = (
                *whole.images[:-1],
                replace(whole.images[-1], image=Image(5, 28, 28, b"")),
            )
            assert again.claim_recorded(asked, prompt, others) is None
        claimed = again.claim_recorded(asked, prompt, whole.images)
        assert claimed is not None and claimed.replayed
        assert again.whole(claimed).images == whole.images
