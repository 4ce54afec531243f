"""A text that is tokenized in pieces has the ids of the whole text, whatever blank the tokenizer puts before
a text.
"""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from controller.offline.tokenized import Example, example_row, scored_row
from workers.agents.prompt_renderer import PromptRenderer
from workers.agents.session import Asked
from workers.engine.requests import Response, not_sampled
from workers.episodes.conversation import Conversation
from workers.errors import DataError
from workers.rendering import Renderer

KINDS = ["prepended", "first", "always", "never", "bytes", "bytes without a blank"]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% elif m.role == 'tool' %}{{ bos_token + '[TOOL] ' + m.content + ' [/TOOL]' }}"
    "{% else %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
PLAIN_TEXT = (
    "{% for m in messages %}{{ '## ' + m.role + '\n' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '## assistant\n' }}{% endif %}"
)
TEMPLATES = {"special tokens between turns": LLAMA_2, "text between turns": PLAIN_TEXT}


def tokenizer(kind: str, template: str | None = None) -> Any:
    blank, line = ("Ġ", "Ċ") if "bytes" in kind else ("▁", "<0x0A>")
    letters = (
        sorted(pre_tokenizers.ByteLevel.alphabet()) if "bytes" in kind else list(map(chr, range(33, 127)))
    )
    single = [] if "bytes" in kind else ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), blank]
    merges = [(blank, "t"), ("t", "w"), (f"{blank}t", "w"), ("tw", "o"), (blank, "[")]
    vocabulary = dict.fromkeys([*single, *letters, *("".join(pair) for pair in merges)])
    numbered = {token: number for number, token in enumerate(vocabulary)}
    assert line in numbered
    bytewise = {} if "bytes" in kind else {"byte_fallback": True, "unk_token": "<unk>"}
    made = Tokenizer(models.BPE(numbered, merges, **bytewise))
    if kind == "prepended":  # Llama 2 and the first Mistral
        made.normalizer = normalizers.Sequence([normalizers.Prepend(blank), normalizers.Replace(" ", blank)])
    elif "bytes" in kind:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "bytes")
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(blank, kind, split=False)
    made.decoder = decoders.ByteLevel() if "bytes" in kind else decoders.Metaspace(blank, "never")
    made.add_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL.values()])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)
    fast.chat_template = template
    return fast


def encoded(tokens: Any, text: str) -> list[int]:
    return list(tokens(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["one", "one:\n", "one</s>", "one </s>\n"])
@pytest.mark.parametrize("response", ["2", "two", " two", "\ntwo", "  ", "é\n\n", "</s>two"])
def test_a_response_has_the_ids_of_the_whole_text(kind: str, prompt: str, response: str) -> None:
    tokens = tokenizer(kind)
    row = example_row(Renderer(tokens), Example(prompt, response), "record 1")
    assert row["input_ids"].tolist() == encoded(tokens, f"{prompt}{response}</s>")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["one:", "one</s>"])
def test_steps_end_at_their_own_last_tokens(kind: str, prompt: str) -> None:
    tokens = tokenizer(kind)
    example = Example(prompt, "two\n4\ntwo", steps=((3, 1.0), (5, 0.0), (9, 1.0)))
    row = scored_row(Renderer(tokens), example, "record 1")
    places = np.flatnonzero(row["loss_mask"])[:2]
    ids = row["input_ids"]
    assert [tokens.decode(ids[: place + 1].tolist())[-1] for place in places] == ["o", "4"]
    assert len(ids) == len(encoded(tokens, f"{prompt}two\n4\ntwo</s>"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_turns_and_observations_have_the_ids_of_the_whole_conversation(
    kind: str, template: str, role: str
) -> None:
    tokens = tokenizer(kind, template)
    renderer = Renderer(tokens)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "one"}]
    prompt = renderer.prompt_ids(messages, "record 1")
    conversation = Conversation(renderer, messages)
    ids = conversation.opened(not_sampled(prompt), "").ids.tolist()
    for number in range(2):
        messages = [*messages, {"role": "assistant", "content": "two"}]
        end = "</s>" if template is LLAMA_2 else ""
        said = f" two {end}" if template is LLAMA_2 else "two"
        text = tokens.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        sampled = encoded(tokens, text + said)[len(ids) :]
        turn = Response(
            np.array(sampled, np.int32),
            np.zeros(len(sampled), np.float32),
            np.zeros(len(sampled), np.int32),
            stop_string=not end,
        )
        observation = {"role": role, "content": f"two {number}"}
        following, branch = conversation.observed(
            turn, conversation.turn(turn.ids, finished=True), [observation]
        )
        assert branch is None
        messages = [*messages, observation]
        ids += [*sampled, *following.ids.tolist()]
        whole = tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ids == encoded(tokens, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_behind_a_text_has_the_ids_of_both(kind: str) -> None:
    tokens = tokenizer(kind)
    conversation = Conversation(Renderer(tokens), "one:")
    prompt = not_sampled(np.array(encoded(tokens, "one:"), np.int32))
    assert conversation.opened(prompt, "two").ids.tolist() == encoded(tokens, "one:two")


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_behind_a_turn_has_the_ids_of_the_whole_text(kind: str) -> None:
    tokens = tokenizer(kind)
    before = not_sampled(np.array(encoded(tokens, "one:two"), np.int32))
    session = Mock(find_text=lambda prompt: Asked([], parent=Mock(), text=prompt.removeprefix("one:two")))
    session.whole = lambda parent: before
    reader = PromptRenderer(Renderer(tokens))
    assert reader.read_text(session, "one:two\ntwo")[1].ids.tolist() == encoded(tokens, "one:two\ntwo")


def test_a_tokenizer_that_joins_everything_is_refused_by_name() -> None:
    tokens = tokenizer("first")
    tokens.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(Regex("[.0a<\n]"), "t")])
    with pytest.raises(DataError, match=r"model\.path"):
        Renderer(tokens).ids_behind("wo", encoded(tokens, "one")[-1], "record 1")
