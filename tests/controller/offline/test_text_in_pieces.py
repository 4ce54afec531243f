"""A text that is tokenized in pieces has the ids of the whole text, whatever blank the tokenizer puts before
a text.
"""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tokenizers import Regex, normalizers

from controller.offline.examples import Example
from controller.offline.tokenized import example_row, scored_row
from tests.workers.tokenizer_schemes import SCHEMES, make_tokenizer, make_word_pieces
from workers.agents.prompt_renderer import PromptRenderer
from workers.agents.session import SessionPrompt
from workers.engine.requests import Response, not_sampled
from workers.episodes.conversation import Conversation
from workers.errors import DataError
from workers.rendering import Renderer
from workers.text_pieces import loses_blanks

LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% elif m.role == 'tool' %}{{ bos_token + '[TOOL] ' + m.content + ' [/TOOL]' }}"
    "{% else %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
PLAIN_TEXT = (
    "{% for m in messages %}{{ '## ' + m.role + '\n' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '## assistant\n' }}{% endif %}"
)
TEMPLATES = {"special tokens between turns": LLAMA_2, "text between turns": PLAIN_TEXT}


ANSWER = "{{ m.content.split('</think>')[-1] + eos_token"
DROPPING = {
    "behind a special token": "{% for m in messages %}{% if m.role == 'assistant' %}"
    + ANSWER
    + " }}"
    "{% else %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' + eos_token }}{% endif %}{% endfor %}",
    "behind text": "{% for m in messages %}{% if m.role == 'assistant' %}"
    + ANSWER
    + " + '\n' }}"
    "{% else %}{{ '## ' + m.content + '\n' }}{% endif %}{% endfor %}",
}
"""Templates that drop the thoughts of earlier turns."""


class Played:
    """An episode, whose turns are parsed as text. ids: of the current row."""

    def __init__(self, tokens: Any, messages: list[dict[str, Any]], rewrites: bool) -> None:
        renderer = Renderer(tokens)
        prompt = renderer.prompt_ids(messages, "record 1")
        self.conversation = Conversation(renderer, messages, rewrites=rewrites)
        self.ids: list[int] = self.conversation.open(not_sampled(prompt), "").ids.tolist()

    def observe(self, sampled: list[int], observation: dict[str, Any]) -> bool:
        """Return whether a new row begins."""
        ids = np.array(sampled, np.int32)
        zeros = np.zeros(len(ids))
        stopped = sampled[-1] != self.conversation._tokenizer.eos_token_id
        turn = Response(
            ids, zeros.astype(np.float32), zeros.astype(np.int32), stop_string=stopped
        )
        said = self.conversation.turn(ids, finished=True)
        following, branch = self.conversation.observe(turn, said, [observation])
        self.ids = (
            [*self.ids, *sampled, *following.ids.tolist()]
            if branch is None
            else branch.ids.tolist()
        )
        return branch is not None


def encoded(tokens: Any, text: str) -> list[int]:
    return list(tokens(text, add_special_tokens=False)["input_ids"])


@pytest.mark.drawn(72, covers=True)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("prompt", ["one", "one:\n", "one</s>", "one </s>\n"])
@pytest.mark.parametrize(
    "response", ["2", "two", " two", "\ntwo", "  ", "é\n\n", "</s>two"]
)
def test_a_response_has_the_ids_of_the_whole_text(
    scheme: str, prompt: str, response: str
) -> None:
    tokens = make_tokenizer(scheme)
    row = example_row(Renderer(tokens), Example(prompt, response), "record 1")
    assert row["input_ids"].tolist() == encoded(tokens, f"{prompt}{response}</s>")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("prompt", ["one:", "one</s>"])
def test_steps_end_at_their_own_last_tokens(scheme: str, prompt: str) -> None:
    tokens = make_tokenizer(scheme)
    example = Example(prompt, "two\n4\ntwo", steps=((3, 1.0), (5, 0.0), (9, 1.0)))
    row = scored_row(Renderer(tokens), example, "record 1")
    places = np.flatnonzero(row["loss_mask"])[:2]
    ids = row["input_ids"]
    assert [tokens.decode(ids[: place + 1].tolist())[-1] for place in places] == ["o", "4"]
    assert len(ids) == len(encoded(tokens, f"{prompt}two\n4\ntwo</s>"))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("begins", "ends"), [(True, False), (False, True), (True, True)])
def test_special_tokens_stand_around_the_text_alone(
    scheme: str, begins: bool, ends: bool
) -> None:
    tokens = make_tokenizer(scheme, begins=begins, ends=ends)
    row = example_row(Renderer(tokens), Example("one:", "two 2\n"), "record 1")
    text = f"{'<s>' if begins else ''}one:two 2\n</s>"
    opening = encoded(tokens, "<s>") if begins else []
    assert row["input_ids"].tolist() == opening + encoded(tokens, text.removeprefix("<s>"))


@pytest.mark.drawn(24, covers=True)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("rewrites", [False, True], ids=["keep", "template"])
def test_turns_and_observations_have_the_ids_of_the_whole_conversation(
    scheme: str, template: str, role: str, rewrites: bool
) -> None:
    tokens = make_tokenizer(scheme, template)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "one"}]
    played = Played(tokens, messages, rewrites)
    for number in range(3):
        messages = [*messages, {"role": "assistant", "content": "two"}]
        end = "</s>" if template is LLAMA_2 else ""
        said = f" two {end}" if template is LLAMA_2 else "two"
        text = tokens.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True
        )
        sampled = encoded(tokens, text + said)[len(played.ids) :]
        observation = {"role": role, "content": f"two {number}"}
        assert not played.observe(sampled, observation)
        messages = [*messages, observation]
        whole = tokens.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert played.ids == encoded(tokens, whole)
        assert tokens.unk_token_id not in played.ids


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("template", DROPPING.values(), ids=DROPPING)
@pytest.mark.parametrize("letters", [False, True])
def test_a_new_row_has_the_ids_of_the_rendered_text_and_of_what_was_sampled(
    scheme: str, template: str, letters: bool
) -> None:
    tokens = make_tokenizer(scheme, template, thinks=True)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "one"}]
    played = Played(tokens, messages, rewrites=True)
    for number in range(3):
        prompt = tokens.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        before = encoded(tokens, prompt)
        sampled = encoded(tokens, f"{prompt}<think>[ 2</think> two tt</s>")[len(before) :]
        sampled = spelled(tokens, sampled) if letters else sampled
        assert played.observe(sampled, {"role": "user", "content": f"two {number}"})
        messages = [*messages, {"role": "assistant", "content": " two tt"}]
        messages = [*messages, {"role": "user", "content": f"two {number}"}]
        answer = sampled[1 + sampled.index(encoded(tokens, "</think>")[0]) :]
        assert str(answer)[1:-1] in str(played.ids)
        assert played.conversation.cut_tokens == 0
        whole = tokens.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        # Its ids behind a special token show a blank that the text lacks.
        if scheme != "prepend":
            assert tokens.decode(played.ids) == tokens.decode(encoded(tokens, whole))


def spelled(tokens: Any, ids: list[int]) -> list[int]:
    """Write `two` in letters, as a policy may."""
    names = [
        letter
        for name in tokens.convert_ids_to_tokens(ids)
        for letter in (name if "tw" in name else [name])
    ]
    return list(tokens.convert_tokens_to_ids(names))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_text_behind_a_text_has_the_ids_of_both(scheme: str) -> None:
    tokens = make_tokenizer(scheme)
    conversation = Conversation(Renderer(tokens), "one:")
    prompt = not_sampled(np.array(encoded(tokens, "one:"), np.int32))
    assert conversation.open(prompt, "two").ids.tolist() == encoded(tokens, "one:two")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_completion_behind_a_turn_has_the_ids_of_the_whole_text(scheme: str) -> None:
    tokens = make_tokenizer(scheme)
    before = not_sampled(np.array(encoded(tokens, "one:two"), np.int32))
    session = Mock(
        find_text=lambda prompt: SessionPrompt(
            [], parent=Mock(), text=prompt.removeprefix("one:two")
        )
    )
    session.whole = lambda parent: before
    reader = PromptRenderer(Renderer(tokens))
    assert reader.read_text(session, "one:two\ntwo")[1].ids.tolist() == encoded(
        tokens, "one:two\ntwo"
    )


def test_a_tokenizer_that_joins_everything_is_refused_by_name() -> None:
    tokens = make_tokenizer("first")
    tokens.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex("[.0a<\n]"), "t")]
    )
    with pytest.raises(DataError, match=r"model\.path"):
        Renderer(tokens).ids_behind("wo", encoded(tokens, "one")[-1], "record 1")


def test_only_word_pieces_lose_blanks() -> None:
    assert not any(loses_blanks(make_tokenizer(scheme)) for scheme in SCHEMES)
    assert loses_blanks(make_word_pieces())
