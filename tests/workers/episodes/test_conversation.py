"""What follows a turn: only new text is encoded, after stock chat templates too. Sampled tokens stay as they
are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.refusals import refused
from tests.workers.episodes.test_history import GLM_ENDS, WITHOUT_TOOLS, sampled
from tests.workers.rollout import stock_templates as stock
from tests.workers.rollout import tiny
from tests.workers.vision_families import pictures
from workers.batch.placed_images import Image
from workers.engine.requests import join_responses, not_sampled
from workers.environment import Turn
from workers.episodes.conversation import Conversation, check_template, continue_messages
from workers.errors import EpisodeError
from workers.images.images import digest_of, png_of
from workers.model.vision.processor import load_placeholders
from workers.rendering import Messages, Renderer

APPENDING = (
    "{% for m in messages %}#{{ m['role'] == 'user' and 'u' or 'a' }}{{ m['content'] }}<eos>;{% endfor %}"
    "{% if add_generation_prompt %}#a{% endif %}"
)
REWRITING = (  # as templates do that leave earlier turns' thoughts out
    "{% for m in messages %}{{ 't' if loop.last and m['role'] == 'assistant' }}{{ m['content'] }}<eos>{% "
    "endfor %}"
)


@pytest.fixture
def tokenizer(tiny_model_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_path)


VISION = "<|vision_start|><|image_pad|><|vision_end|>"
AND = f"{VISION}or {VISION}"


@pytest.fixture
def chat(tokenizer: Any) -> Any:
    tokenizer.chat_template = APPENDING
    return tokenizer


def test_a_text_follows_a_text(tokenizer: Any) -> None:
    conversation = Conversation(Renderer(tokenizer), "a")
    assert (
        conversation.open(not_sampled(ids_of("a")), "bc").ids.tolist()
        == ids_of("abc").tolist()
    )
    assert (
        conversation.open(not_sampled(ids_of("a")), "").ids.tolist() == ids_of("a").tolist()
    )
    assert conversation.turn(ids_of("d", tiny.EOS), finished=True) == "d"
    assert (
        observation_ids(conversation, ids_of("d", tiny.EOS), "ef").tolist()
        == ids_of("ef").tolist()
    )
    with pytest.raises(EpisodeError):
        observation_ids(
            conversation, ids_of("d", tiny.EOS), [{"role": "user", "content": "e"}]
        )


def observation_ids(
    conversation: Conversation, ids: np.ndarray, observation: Any
) -> np.ndarray:
    """The ids that follow a turn in the same row."""
    following, branch = conversation.observe(
        sampled(ids), conversation.turn(ids, finished=True), observation
    )
    assert branch is None
    return following.ids


def ids_of(text: str, *more: int) -> np.ndarray:
    return np.array([*(ord(character) - 31 for character in text), *more], np.int32)


def test_turns_and_observations_together_are_what_the_template_renders(chat: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    conversation = Conversation(Renderer(chat), messages)
    ids = chat.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    for said, answer in (("four", "sure?"), ("yes", "good")):
        turn = ids_of(said, tiny.EOS)
        ids += [*turn.tolist(), *observation_ids(conversation, turn, answer).tolist()]
        messages = [
            *messages,
            {"role": "assistant", "content": said},
            {"role": "user", "content": answer},
        ]
    assert ids == chat.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def test_an_opening_of_messages_is_rendered_with_the_prompt(chat: Any) -> None:
    prompt, opening = (
        [{"role": "system", "content": "be"}],
        [{"role": "user", "content": "go"}],
    )
    opened = (
        Conversation(Renderer(chat), prompt).open(not_sampled(ids_of("x")), opening).ids
    )
    rendered = chat.apply_chat_template(
        prompt + opening, add_generation_prompt=True, return_dict=False
    )
    assert opened.tolist() == rendered


def test_a_template_that_rewrites_earlier_turns_is_continued(chat: Any) -> None:
    chat.chat_template = REWRITING
    check_template(Renderer(chat), "models/tiny", key="rollout.environment")
    conversation = Conversation(Renderer(chat), [{"role": "user", "content": "hi"}])
    for answer in ("sure?", "good"):
        assert (
            observation_ids(conversation, ids_of("four", tiny.EOS), answer).tolist()
            == ids_of(answer, tiny.EOS).tolist()
        )


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no') if messages[1:] }}", "{{ messages[0]['content'] }}"],
)
def test_a_template_that_cannot_continue_is_refused_before_the_run(
    chat: Any, template: str
) -> None:
    chat.chat_template = template
    with refused("rollout.environment"):
        check_template(Renderer(chat), "models/tiny", key="rollout.environment")


USER = {"role": "user", "content": 'Sure? é "4"'}
TOOL = {"role": "tool", "content": "4", "name": "add"}


@pytest.mark.parametrize("name", stock.NAMES)
@pytest.mark.parametrize(
    "observation", [[USER], [TOOL, TOOL | {"content": "5"}], [TOOL, USER]]
)
def test_stock_templates_continue_every_turn_alike(
    name: str, observation: Messages
) -> None:
    renderer = Renderer(stock.tokenizer(name))

    def render(messages: Messages, *, add_generation_prompt: bool = True) -> str:
        return renderer.text(messages, "x", add_generation_prompt=add_generation_prompt)

    prompt = [{"role": "user", "content": "2 + 2?"}]
    answer = {"role": "assistant", "content": "four"}
    before = render([*prompt, answer], add_generation_prompt=False)
    role = observation[0]["role"]
    end = GLM_ENDS[role] if name == "glm4moe" else before.rpartition("four")[2].strip()
    if role == "tool" and name in WITHOUT_TOOLS:
        with pytest.raises(EpisodeError):
            continue_messages(render, prompt, observation, end)
        return
    messages, text = continue_messages(render, prompt, observation, end)
    assert "stand-in" not in text
    assert "</tool_call>" not in text
    # Which opens the outputs of tools once in a conversation.
    if not name.startswith("deepseek"):
        assert continue_messages(render, messages, observation, end)[1] == text


@pytest.mark.parametrize("rewrites", [False, True])
def test_images_are_expanded_where_the_template_shows_them(
    vision_model: Callable[[str], Path], rewrites: bool
) -> None:
    """A turn writes a placeholder, which is not an image's. With `rewrites` the template drops
    its thought.
    """
    path = vision_model("qwen2_5_vl")
    tokenizer, placeholders = (
        AutoTokenizer.from_pretrained(path),
        load_placeholders(str(path)),
    )
    assert placeholders is not None
    renderer = Renderer(tokenizer, placeholders=placeholders)
    given, *shown = [
        Image(digest_of(each), *each.size, png_of(each)) for each in pictures()
    ]
    prompt = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}
    ]
    conversation = Conversation(renderer, prompt, images=[given], rewrites=rewrites)
    ids, placed = renderer.expand(renderer.prompt_ids(prompt, "x"), [given], "x")
    opened = conversation.open(not_sampled(ids, images=placed), "")
    assert (opened.images, opened.ids.tolist()) == (placed, ids.tolist())
    turn = np.array(
        renderer.ids(f"<think>hm</think>so {placeholders.token}it<|im_end|>", "x"), np.int32
    )
    said = Turn("", content=f"so {placeholders.token}it", reasoning="hm")
    parts = [{"type": "image", "image": pictures()[1]}, {"type": "text", "text": "or "}]
    answer = [
        {
            "role": "user",
            "content": [*parts, {"type": "image", "image": png_of(pictures()[2])}],
        }
    ]
    following, branch = conversation.observe(sampled(turn), said, answer)
    bare = renderer.ids(
        f"\n<|im_start|>user\n{AND}<|im_end|>\n<|im_start|>assistant\n", "x"
    )
    expected, places = renderer.expand(np.array(bare, np.int32), shown, "x")
    assert (following.ids.tolist(), following.images) == (expected.tolist(), places)
    assert (branch is not None) == rewrites
    if branch is not None:
        kept = np.array(renderer.ids(f"so {placeholders.token}it<|im_end|>", "x"), np.int32)
        whole = join_responses([opened, not_sampled(kept), following])
        assert (branch.ids.tolist(), branch.images) == (whole.ids.tolist(), whole.images)
        assert [placed.image for placed in branch.images] == [given, *shown]


def test_broken_images_and_templates_that_hide_them_fail_the_episode(
    vision_model: Callable[[str], Path],
) -> None:
    path = vision_model("qwen2_5_vl")
    tokenizer = AutoTokenizer.from_pretrained(path)
    renderer = Renderer(tokenizer, placeholders=load_placeholders(str(path)))
    for image in ("http://a/b.png", b"broken"):
        conversation = Conversation(renderer, [{"role": "user", "content": "hi"}])
        with pytest.raises(EpisodeError, match="the conversation"):
            conversation.observe(
                sampled(np.array([5, 257], np.int32)),
                Turn("a"),
                [{"role": "user", "content": [{"type": "image", "image": image}]}],
            )
