"""Which tokens of a record are learned: by the template's marks, by prefixes, or behind a text prompt."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from controller.data.records import Record
from controller.offline.examples import preference_examples, sft_examples
from controller.offline.tokenized import Row, example_row
from examples.addition.warm_start import tokenizer as characters
from tests.refusals import refused
from workers.errors import DataError
from workers.rendering import Renderer

MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>{% "
    "endgeneration %}{% else %}{{ m.content }}={% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '=' }}{% endfor %}"
SFT, PAIR = ("messages", "prompt", "response"), ("prompt", "chosen", "rejected")
FORGETFUL = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '#' }}.{% endfor %}"


def tokenizer(template: str | None = None) -> Renderer:
    made = characters()
    made.chat_template = template
    return Renderer(made)


def turns(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[i % 2], "content": text}
        for i, text in enumerate(contents)
    ]


def learned(row: Row) -> str:
    """The learned tokens, with `_` for the others."""
    made = characters()
    pieces = [
        made.decode([i]) if mask else "_"
        for i, mask in zip(row["input_ids"], row["loss_mask"], strict=True)
    ]
    assert row["input_ids"].dtype == np.int32
    return "".join(pieces)


def sft_row(made: Renderer, record: Record, where: str = "record 1") -> Row:
    (example,) = sft_examples(record, SFT, where)
    return example_row(made, example, where)


def pair(made: Renderer, record: Record, where: str = "record 1") -> list[str]:
    return [
        learned(example_row(made, example, where))
        for example in preference_examples(record, PAIR, where)
    ]


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "by prefixes"])
def test_every_assistant_turn_of_a_conversation_is_learned_and_nothing_else(
    template: str,
) -> None:
    row = sft_row(tokenizer(template), {"messages": turns("1+1", "2", "2+2", "4")})
    assert learned(row) == "____2<eos>____4<eos>"


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "by prefixes"])
@pytest.mark.parametrize(
    "response", ["4", [{"role": "assistant", "content": "4"}]], ids=["text", "messages"]
)
def test_of_a_prompt_with_turns_the_response_alone_is_learned(
    template: str, response: Any
) -> None:
    row = sft_row(
        tokenizer(template), {"prompt": turns("1+1", "2", "2+2"), "response": response}
    )
    assert learned(row) == "__________4<eos>"


def test_a_text_response_is_learned_with_its_end() -> None:
    adding = tokenizer()
    end = ("<eos>", adding.tokenizer.eos_token_id)
    adding.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[end]
    )
    for made, response in itertools.product((tokenizer(), adding), ("2", "2<eos>")):
        assert (
            learned(sft_row(made, {"prompt": "1+1=", "response": response})) == "____2<eos>"
        )


def test_a_record_is_a_conversation_where_it_has_one() -> None:
    record = {"messages": turns("1+1", "2"), "prompt": "3+3=", "response": "6"}
    assert learned(sft_row(tokenizer(PLAIN), record)) == "____2<eos>"
    assert learned(sft_row(tokenizer(PLAIN), record | {"messages": None})) == "____6<eos>"
    del record["messages"]
    assert learned(sft_row(tokenizer(PLAIN), record)) == "____6<eos>"
    with refused("record 3", DataError):
        sft_examples({"prompt": "3+3="}, SFT, "record 3")


STRICT = "{% if messages | length > 2 %}{{ raise_exception('one turn alone') }}{% endif %}"


@pytest.mark.parametrize("template", [FORGETFUL, STRICT + MARKED, STRICT + PLAIN, None])
def test_a_template_that_is_missing_raises_or_rewrites_earlier_turns_is_refused_and_not_guessed(
    template: str | None,
) -> None:
    with refused("model.path", DataError):
        sft_row(
            tokenizer(template), {"messages": turns("1+1", "2", "2+2", "4")}, "record 5"
        )


@pytest.mark.parametrize(
    "record",
    [
        {"messages": turns("1+1")},
        {"messages": []},
        {"messages": "1+1=2"},
        {"messages": ["1+1", "2"]},
        {"prompt": "1+1=", "response": 2},
        {"prompt": turns("1+1"), "response": 2},
    ],
)
def test_a_record_without_anything_to_learn_is_refused(record: Record) -> None:
    with refused("record 1", DataError):
        sft_row(tokenizer(PLAIN), record)


def test_pairs_share_their_prompt_given_or_common() -> None:
    expected = ["____2<eos>", "____3<eos>"]
    assert pair(tokenizer(), {"prompt": "1+1=", "chosen": "2", "rejected": "3"}) == expected
    whole = {"chosen": turns("1+1", "2"), "rejected": turns("1+1", "3")}
    user, answers = turns("1+1", "2")[:1], {name: side[1:] for name, side in whole.items()}
    for prompt in ({}, {"prompt": "1+1"}, {"prompt": user}, {"prompt": json.dumps(user)}):
        assert pair(tokenizer(PLAIN), prompt | whole) == expected
    for prompt in ("1+1", user):
        assert pair(tokenizer(PLAIN), {"prompt": prompt} | answers) == expected
    with refused("data.prompt_key=''", DataError):  # their common message is not the prompt
        preference_examples({"prompt": "2+2"} | whole, PAIR, "record 2")
    for record in (
        {"chosen": "2", "rejected": "3"},
        {"prompt": "1+1=", "chosen": "2"},
        # Whose beginnings differ.
        {"chosen": turns("1+1", "2"), "rejected": turns("2+2", "3")},
    ):
        with refused("record 2", DataError):
            preference_examples(record, PAIR, "record 2")
