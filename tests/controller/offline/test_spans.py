"""Which text is learned where turns begin otherwise than the generation prompt says: never a header."""

from typing import Any

import pytest

from controller.offline.examples import preference_examples, sft_examples
from controller.offline.tokenized import example_row, scored_row
from tests.controller.offline.test_stock_templates import (
    TEMPLATES,
    renderer,
    runs,
    tool,
    turn,
    user,
)

SIMPLE = (
    "{% for m in messages %}{{ '\n\n' if not loop.first else '' }}{{ m.role.capitalize() + ': ' + "
    "m.content }}{% if loop.last and not add_generation_prompt %}{{ '<eos>' }}{% endif %}{% endfor %}"
)
SIMPLE_PROMPTED = SIMPLE + "{% if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}"
THINKING = SIMPLE + "{% if add_generation_prompt %}{{ 'Assistant: <think>' }}{% endif %}"
INSTRUCTED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'Reason first. Assistant: ' + m.content + "
    "'<eos>' }}{% else %}{{ 'User: ' + m.content + '\n' }}{% endif %}{% endfor %}{% if "
    "add_generation_prompt %}{{ 'Reason first. Assistant: <think>' }}{% endif %}"
)
FORMS = {
    "simple": SIMPLE,
    "prompted": SIMPLE_PROMPTED,
    "thinking": THINKING,
    "instructed": INSTRUCTED,
}
FORMS |= {name: TEMPLATES[name] for name in ("qwen2_5", "qwen3", "llama3", "phi3")}
KIMI = (  # as Kimi-K2-Thinking: thoughts up to the last message without calls are dropped
    "{% set at = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not "
    "m.tool_calls %}{% set at.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_{{ "
    "m.role }}|>{{ m.role }}<|im_middle|>{% if m.role == 'assistant' %}<think>{{ m.reasoning_content if "
    "loop.index0 > at.last else '' }}</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] "
    "%}<|call|>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor "
    "%}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
CONVERSATIONS = {
    "assistant first": [turn("say1"), user("ask2"), turn("say2")],
    "two in a row": [user("ask1"), turn("say1"), turn("say2")],
    "plain": [user("ask1"), turn("say1"), user("ask2"), turn("say2")],
}
HEADERS = ("ssistant", "ser", "ystem", "ask", "eason", "start", "header", "<s>")


def learned(name: str, example: Any, train_on: str = "all") -> list[str]:
    made = renderer(FORMS[name])
    row = example_row(made, example, "x", train_on)
    return runs(made, row["input_ids"], row["loss_mask"])


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("name", FORMS)
def test_no_header_is_learned(name: str, kind: str) -> None:
    (example,) = sft_examples(
        {"messages": CONVERSATIONS[kind]}, ("messages", "prompt", "response"), "x"
    )
    for train_on, words in (("all", ["say1", "say2"]), ("last", ["say2"])):
        texts = learned(name, example, train_on)
        assert not [header for header in HEADERS if header in "".join(texts)], texts
        assert [word for word in ("say1", "say2") if word in "".join(texts)] == words


@pytest.mark.parametrize("name", FORMS)
def test_pairs_and_scored_responses_hold_no_header(name: str) -> None:
    record = {
        "prompt": [user("ask1")],
        "chosen": [turn("say1")],
        "rejected": [turn("say2")],
    }
    for example, word in zip(
        preference_examples(record, ("prompt", "chosen", "rejected"), "x"),
        ("say1", "say2"),
        strict=True,
    ):
        (text,) = learned(name, example)
        assert word in text
        assert not [header for header in HEADERS if header in text], text
        assert scored_row(renderer(FORMS[name]), example, "x")["loss_mask"].sum() == 1


@pytest.mark.parametrize("name", ["gptoss", "kimi"])
@pytest.mark.parametrize("train_on", ["all", "last"])
def test_thoughts_that_go_once_the_answer_is_there_move_no_span(
    name: str, train_on: str
) -> None:
    thought = "thinking" if name == "gptoss" else "reasoning_content"
    messages = [user("ask1"), turn(calls=(71,)), tool("got1", 1), turn("say1")]
    messages[1] |= {thought: "think1"}
    messages[3] |= {thought: "think2"}
    made = renderer({**TEMPLATES, "kimi": KIMI}[name])
    (example,) = sft_examples(
        {"messages": messages}, ("messages", "prompt", "response"), "x"
    )
    row = example_row(made, example, "x", train_on)
    text = "".join(runs(made, row["input_ids"], row["loss_mask"]))
    assert "got1" not in text
    assert "middle" not in text
    assert "say1" in text
    assert ("71" in text) == (train_on == "all")
