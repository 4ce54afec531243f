"""Which tokens of a record are learned: by the template's marks, by prefixes, or behind a text prompt."""

import itertools
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from controller.data.records import Record
from controller.offline.tokenized import Row, example_row, preference_examples, sft_examples
from examples.addition.warm_start import tokenizer as characters
from workers.errors import DataError
from workers.rendering import Renderer

MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>{% endgeneration %}"
    "{% else %}{{ m.content }}={% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '=' }}{% endfor %}"
SFT, PAIR = ("messages", "prompt", "response"), ("prompt", "chosen", "rejected")
FORGETFUL = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '#' }}.{% endfor %}"


def tokenizer(template: str | None = None) -> Renderer:
    made = characters()
    made.chat_template = template
    return Renderer(made)


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def learned(row: Row) -> str:
    """The learned tokens, with `_` for the others."""
    made = characters()
    pieces = [made.decode([i]) if mask else "_" for i, mask in zip(row["input_ids"], row["loss_mask"], strict=True)]
    assert row["input_ids"].dtype == np.int32
    return "".join(pieces)


def sft_row(made: Renderer, record: Record, where: str = "record 1") -> Row:
    (example,) = sft_examples(record, SFT, where)
    return example_row(made, example, where)


def pair(made: Renderer, record: Record, where: str = "record 1") -> list[str]:
    return [learned(example_row(made, example, where)) for example in preference_examples(record, PAIR, where)]


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "by prefixes"])
def test_every_assistant_turn_of_a_conversation_is_learned_and_nothing_else(template: str) -> None:
    row = sft_row(tokenizer(template), {"messages": turns("1+1", "2", "2+2", "4")})
    assert learned(row) == "____2<eos>____4<eos>"


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "by prefixes"])
@pytest.mark.parametrize("response", ["4", [{"role": "assistant", "content": "4"}]], ids=["text", "messages"])
def test_of_a_prompt_with_turns_the_response_alone_is_learned(template: str, response: Any) -> None:
    row = sft_row(tokenizer(template), {"prompt": turns("1+1", "2", "2+2"), "response": response})
    assert learned(row) == "__________4<eos>"


def test_a_text_response_is_learned_with_its_end() -> None:
    adding = tokenizer()
    end = ("<eos>", adding.tokenizer.eos_token_id)
    adding.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[end])
    for made, response in itertools.product((tokenizer(), adding), ("2", "2<eos>")):
        assert learned(sft_row(made, {"prompt": "1+1=", "response": response})) == "____2<eos>"


def test_a_record_is_a_conversation_where_it_has_one() -> None:
    record = {"messages": turns("1+1", "2"), "prompt": "3+3=", "response": "6"}
    assert learned(sft_row(tokenizer(PLAIN), record)) == "____2<eos>"
    assert learned(sft_row(tokenizer(PLAIN), record | {"messages": None})) == "____6<eos>"
    del record["messages"]
    assert learned(sft_row(tokenizer(PLAIN), record)) == "____6<eos>"
    with pytest.raises(DataError, match=r"record 3 has neither 'messages' nor 'response'; set data.messages_key"):
        sft_examples({"prompt": "3+3="}, SFT, "record 3")


def test_a_template_that_rewrites_earlier_turns_is_refused_and_not_guessed() -> None:
    with pytest.raises(DataError, match=r"record 5: the chat template of model.path renders messages differently"):
        sft_row(tokenizer(FORGETFUL), {"messages": turns("1+1", "2", "2+2", "4")}, "record 5")


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "by prefixes"])
def test_a_template_that_raises_names_the_record(template: str) -> None:
    strict = "{% if messages | length > 2 %}{{ raise_exception('one turn alone') }}{% endif %}" + template
    with pytest.raises(DataError, match=r"record 5 is not rendered by the chat template of model.path: .*one turn"):
        sft_row(tokenizer(strict), {"messages": turns("1+1", "2", "2+2", "4")}, "record 5")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": turns("1+1")}, "has no token to learn"),
        ({"messages": []}, "has an empty list of chat messages"),
        ({"messages": "1+1=2"}, "has a value of type str in place of a list of chat messages"),
        ({"messages": ["1+1", "2"]}, "has a chat message that is no object with a role and a content"),
        ({"prompt": "1+1=", "response": 2}, "has a text as prompt, and a response of type int"),
        ({"prompt": turns("1+1"), "response": 2}, "has a value of type int in place of a list of chat messages"),
    ],
)
def test_a_record_without_anything_to_learn_is_refused(record: Record, message: str) -> None:
    with pytest.raises(DataError, match=message):
        sft_row(tokenizer(PLAIN), record)


def test_chat_messages_need_a_template() -> None:
    with pytest.raises(DataError, match=r"the tokenizer of model.path has no chat template"):
        sft_row(tokenizer(), {"messages": turns("1+1", "2")})


def test_pairs_share_their_prompt_given_or_common() -> None:
    expected = ["____2<eos>", "____3<eos>"]
    assert pair(tokenizer(), {"prompt": "1+1=", "chosen": "2", "rejected": "3"}) == expected
    whole = {"chosen": turns("1+1", "2"), "rejected": turns("1+1", "3")}
    assert pair(tokenizer(PLAIN), whole) == expected
    with pytest.raises(DataError, match=r"record 2 has no prompt; set data.prompt_key"):
        preference_examples({"chosen": "2", "rejected": "3"}, PAIR, "record 2")
    with pytest.raises(DataError, match=r"record 2 has no 'rejected'; set data.chosen_key and data.rejected_key"):
        preference_examples({"prompt": "1+1=", "chosen": "2"}, PAIR, "record 2")
    with pytest.raises(DataError, match=r"record 2 has no prompt, and its chosen and rejected messages begin differ"):
        preference_examples({"chosen": turns("1+1", "2"), "rejected": turns("2+2", "3")}, PAIR, "record 2")
