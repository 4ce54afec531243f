"""Which tokens of a record are learned: by the template's marks, by prefixes, or behind a text prompt."""

from typing import Any

import numpy as np
import pytest

from controller.offline.tokenized import Row, conversation_row, pair_rows, record_row, response_row
from examples.addition.warm_start import tokenizer as characters
from workers.errors import DataError

MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>{% endgeneration %}"
    "{% else %}{{ m.content }}={% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '=' }}{% endfor %}"
FORGETFUL = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '#' }}.{% endfor %}"


def tokenizer(template: str | None = None) -> Any:
    made = characters()
    made.chat_template = template
    return made


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def learned(row: Row) -> str:
    """The learned tokens, with `_` for the others."""
    made = tokenizer()
    pieces = [made.decode([i]) if mask else "_" for i, mask in zip(row["input_ids"], row["loss_mask"], strict=True)]
    assert row["input_ids"].dtype == np.int32
    return "".join(pieces)


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "by prefixes"])
def test_every_assistant_turn_of_a_conversation_is_learned_and_nothing_else(template: str) -> None:
    row = conversation_row(tokenizer(template), turns("1+1", "2", "2+2", "4"), "record 0")
    assert learned(row) == "____2<eos>____4<eos>"


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "by prefixes"])
def test_of_a_prompt_with_turns_the_response_alone_is_learned(template: str) -> None:
    row = response_row(tokenizer(template), turns("1+1", "2", "2+2"), "4", "record 0")
    assert learned(row) == "__________4<eos>"


def test_a_text_response_is_learned_with_its_end() -> None:
    assert learned(response_row(tokenizer(), "1+1=", "2", "record 0")) == "____2<eos>"


def test_a_record_is_a_conversation_where_it_has_the_column() -> None:
    record = {"messages": turns("1+1", "2"), "prompt": "3+3=", "response": "6"}
    keys = ("messages", "prompt", "response")
    assert learned(record_row(tokenizer(PLAIN), record, keys, "record 0")) == "____2<eos>"
    del record["messages"]
    assert learned(record_row(tokenizer(PLAIN), record, keys, "record 0")) == "____6<eos>"
    with pytest.raises(DataError, match=r"record 3 has neither 'messages' nor 'response'; set data.messages_key"):
        record_row(tokenizer(PLAIN), {"prompt": "3+3="}, keys, "record 3")


def test_a_template_that_rewrites_earlier_turns_is_refused_and_not_guessed() -> None:
    with pytest.raises(DataError, match=r"record 5: the chat template of model.path renders messages differently"):
        conversation_row(tokenizer(FORGETFUL), turns("1+1", "2", "2+2", "4"), "record 5")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (turns("1+1"), "has no token to learn"),
        ([], "needs a list of chat messages"),
        ("1+1=2", "needs a list of chat messages, not str"),
    ],
)
def test_a_conversation_without_anything_to_learn_is_refused(messages: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        conversation_row(tokenizer(PLAIN), messages, "record 0")


def test_chat_messages_need_a_template() -> None:
    with pytest.raises(DataError, match=r"the tokenizer of model.path has no chat template"):
        conversation_row(tokenizer(), turns("1+1", "2"), "record 0")


def test_pairs_share_their_prompt_given_or_common() -> None:
    keys = ("prompt", "chosen", "rejected")
    texts = pair_rows(tokenizer(), {"prompt": "1+1=", "chosen": "2", "rejected": "3"}, keys, "record 0")
    assert [learned(row) for row in texts] == ["____2<eos>", "____3<eos>"]
    whole = {"chosen": turns("1+1", "2"), "rejected": turns("1+1", "3")}
    assert [learned(row) for row in pair_rows(tokenizer(PLAIN), whole, keys, "record 0")] == [
        "____2<eos>",
        "____3<eos>",
    ]
    with pytest.raises(DataError, match=r"record 2 has no prompt; set data.prompt_key"):
        pair_rows(tokenizer(), {"chosen": "2", "rejected": "3"}, keys, "record 2")
    with pytest.raises(DataError, match=r"record 2 has no 'rejected'; set data.chosen_key and data.rejected_key"):
        pair_rows(tokenizer(), {"prompt": "1+1=", "chosen": "2"}, keys, "record 2")
