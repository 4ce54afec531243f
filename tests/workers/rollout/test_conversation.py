"""What follows a turn: only new text is encoded, and chat templates that would change old text are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.workers.rollout import tiny
from workers.errors import ConfigError, EpisodeError
from workers.rendering import Renderer
from workers.rollout.conversation import Conversation, check_template

APPENDING = (
    "{% for m in messages %}#{{ m['role'] == 'user' and 'u' or 'a' }}{{ m['content'] }}<eos>;{% endfor %}"
    "{% if add_generation_prompt %}#a{% endif %}"
)
REWRITING = (  # as templates do that leave earlier turns' thoughts out
    "{% for m in messages %}{{ m['content'] if loop.last else '-' }}<eos>{% endfor %}"
)
ENDLESS = "{% for m in messages %}{{ m['content'] }};{% endfor %}"


@pytest.fixture
def tokenizer(tiny_model_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_path)


@pytest.fixture
def chat(tokenizer: Any) -> Any:
    tokenizer.chat_template = APPENDING
    return tokenizer


def test_a_text_follows_a_text(tokenizer: Any) -> None:
    conversation = Conversation(Renderer(tokenizer), "a", "tiny")
    assert conversation.opened(ids_of("a"), "bc").tolist() == ids_of("abc").tolist()
    assert conversation.opened(ids_of("a"), "").tolist() == ids_of("a").tolist()
    assert conversation.response(ids_of("d", tiny.EOS)) == "d"
    assert conversation.observation_ids(ids_of("d", tiny.EOS), "ef").tolist() == ids_of("ef").tolist()
    with pytest.raises(EpisodeError):
        conversation.observation_ids(ids_of("d", tiny.EOS), [{"role": "user", "content": "e"}])


def ids_of(text: str, *more: int) -> np.ndarray:
    return np.array([*(ord(character) - 31 for character in text), *more], np.int32)


def test_turns_and_observations_together_are_what_the_template_renders(chat: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    conversation = Conversation(Renderer(chat), messages, "tiny")
    ids = chat.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    for said, answer in (("four", "sure?"), ("yes", "good")):
        turn = ids_of(said, tiny.EOS)
        ids += [*turn.tolist(), *conversation.observation_ids(turn, answer).tolist()]
        messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": answer}]
    assert ids == chat.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_an_opening_of_messages_is_rendered_with_the_prompt(chat: Any) -> None:
    prompt, opening = [{"role": "system", "content": "be"}], [{"role": "user", "content": "go"}]
    opened = Conversation(Renderer(chat), prompt, "tiny").opened(ids_of("x"), opening)
    rendered = chat.apply_chat_template(prompt + opening, add_generation_prompt=True, return_dict=False)
    assert opened.tolist() == rendered


@pytest.mark.parametrize(("template", "reason"), [(REWRITING, "renders earlier"), (ENDLESS, "does not end")])
def test_a_template_that_cannot_go_on_is_refused_before_the_run(chat: Any, template: str, reason: str) -> None:
    check_template(Renderer(chat), "models/tiny")
    chat.chat_template = template
    with pytest.raises(ConfigError, match=f"rollout.environment: the chat template of models/tiny {reason}"):
        check_template(Renderer(chat), "models/tiny")
