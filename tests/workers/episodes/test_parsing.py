"""The policy's turn as reasoning, content and calls, by vLLM's parsers."""

import logging
import pickle
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refused
from tests.workers.rollout import stock_templates as stock
from tests.workers.vision_families import byte_tokenizer
from workers.engine.requests import STOP, Response, not_sampled
from workers.environment import Turn
from workers.episodes.conversation import Conversation
from workers.episodes.parser_names import FORMATS, known_parsers, parsers_of
from workers.episodes.parsing import TurnParser
from workers.rendering import Messages, Renderer

QWEN3, QWEN3_CODER, LLAMA = (
    "<tool_call></think>",
    "<tool_call><function=</think>",
    "ipython",
)
END = "<|im_end|>"
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {name: {"type": "integer"} for name in "ab"},
            },
        },
    }
]
MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=add>",
    '{"name": "add", ',
    END,
    "\n",
    "é",
)


@cache
def qwen_tokenizer() -> Any:
    """A token a byte, and Qwen3's added tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    return tokenizer


def turn_of(
    text: str,
    template: str = QWEN3,
    *,
    finished: bool = True,
    parser: str = "",
    **options: Any,
) -> Turn:
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = template
    read = TurnParser(tokenizer, parser, "", {"tools": TOOLS} | options)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": ""}], tokenize=False
    )
    return read.turn(ids_of(text), finished, ids_of(prompt))


def ids_of(text: str) -> np.ndarray:
    return np.array(qwen_tokenizer()(text)["input_ids"], np.int32)


@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content", "calls"),
    [
        (QWEN3, f"<think>\nhm\n</think>\n\n{ADD}{END}", "\nhm\n", "", [{"a": 1, "b": 2}]),
        (QWEN3, f"so\n{ADD}\n{ADD}{END}", "", "so\n", [{"a": 1, "b": 2}] * 2),
        (
            QWEN3,
            f"{ADD.replace('{', '[').replace('[', '{', 1).replace('}}', ']}')}{END}",
            "",
            None,
            [],
        ),
        (QWEN3, ADD.replace('{"a": 1, "b": 2}', "5"), "", "", ["5"]),
        (QWEN3, f"12{END}", "", "12", []),  # vLLM's parser takes this for reasoning
        (QWEN3, "<think>\nhm", "\nhm", "", []),
        # The template opens the reasoning.
        (f"<think>\n{QWEN3_CODER[:-8]}{{# </think> #}}", f"12{END}", "12", "", []),
        (
            QWEN3_CODER,
            "<think>x</think><tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
            f"</tool_call>{END}",
            "x",
            "",
            [{"a": 1}],
        ),
        ("plain", f"{ADD}{END}", "", ADD, []),
    ],
)
def test_a_turn_has_the_parts_that_the_model_wrote(
    template: str, text: str, reasoning: str, content: str | None, calls: list[Any]
) -> None:
    turn = turn_of(text, template)
    assert (turn, turn.text, turn.reasoning) == (text.replace(END, ""), text, reasoning)
    assert content is None or turn.content == content
    assert [call["function"] for call in turn.tool_calls] == [
        {"name": "add", "arguments": each} for each in calls
    ]
    assert [call["id"] for call in turn.tool_calls] == ["call00001", "call00002"][
        : len(calls)
    ]
    assert bool(turn.errors) == (content is None)
    again = pickle.loads(pickle.dumps(turn))
    assert vars(again) == vars(turn) and again == turn and again.message() == turn.message()


THINKING = [name for name in stock.NAMES if "</think>" in stock.source(name)]
CONDITIONAL = (
    "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>assistant"
    "<think>{{ '</think>' if '/no_think' in messages[0]['content'] }}"
)


def parts_of(
    name: str, prompt: Messages, observation: Messages
) -> list[tuple[str, str, bool]]:
    """Return reasoning, content and whether the prompt opens the reasoning, of a turn and of the next."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = CONDITIONAL if name == "conditional" else stock.source(name)
    renderer = Renderer(tokenizer)
    parser = TurnParser(tokenizer, "", "", {})
    conversation = Conversation(renderer, prompt, {}, parser)
    text = renderer.text(prompt, "the prompt", add_generation_prompt=True)
    ids = ids_of(f"12{END}")
    conversation.open(not_sampled(ids_of(text)), "")
    parts = []
    for _ in range(2):
        turn = conversation.turn(ids, finished=True)
        parts.append(
            (turn.reasoning, turn.content, "<think>" in text.rpartition("</think>")[2])
        )
        numbers = np.zeros(len(ids))
        sampled = Response(ids, numbers.astype(np.float32), numbers.astype(np.int32), STOP)
        text = str(
            tokenizer.decode(conversation.observe(sampled, turn, observation)[0].ids)
        )
    return parts


@pytest.mark.parametrize("name", [*THINKING, "conditional"])
@pytest.mark.parametrize("prompt", ["2?", "2? /no_think"])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_turn_without_marks_is_reasoning_where_its_prompt_opens_it(
    name: str, prompt: str, role: str
) -> None:
    observation = [{"role": role, "content": "4", "name": "add"}]
    for reasoning, content, opened in parts_of(
        name, [{"role": "user", "content": prompt}], observation
    ):
        assert (reasoning, content) == (("12", "") if opened else ("", "12"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>',
            "JSONDecodeError",
        ),
        ('<tool_call>\n{"name": "add"}\n</tool_call>', "arguments"),
    ],
)
def test_a_call_that_cannot_be_read_is_told_and_logs_nothing(
    text: str, words: str, caplog: Any
) -> None:
    turn = turn_of(text)
    assert len(turn.errors) == 1 and words in turn.errors[0] and turn.tool_calls == []
    assert turn_of("<tool_call>\n<functio\n</tool_call>", QWEN3_CODER).errors
    assert caplog.records == []


@pytest.mark.parametrize("exc_info", [False, True])
def test_a_warning_of_a_parser_is_not_an_error(
    exc_info: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Parser:
        def parse(self, body: str, *_: Any, **__: Any) -> tuple[str, str, list[Any]]:
            logging.getLogger("vllm.tool_parsers").warning(
                "a schema is odd", exc_info=exc_info
            )
            return "", body, []

    monkeypatch.setattr(TurnParser, "_parser", lambda *_: Parser())
    assert turn_of("12").errors == []


def test_schemas_that_vllm_refuses_are_left_out() -> None:
    assert turn_of(
        ADD, tools=[{"type": "function", "function": {"name": "add", "parameters": 5}}]
    ).tool_calls


@given(
    st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=5))),
    st.booleans(),
    st.sampled_from([QWEN3, QWEN3_CODER]),
)
def test_any_text_is_a_turn(parts: list[str], finished: bool, template: str) -> None:
    text = "".join(parts).encode(errors="replace").decode()
    turn = turn_of(text, template, finished=finished)
    assert turn.text == text and turn == text.replace(END, "")


def test_parsers_are_found_by_template_or_refused_by_name() -> None:
    assert {each.tools for each in FORMATS} <= known_parsers("tool_parser")
    assert {each.reasoning for each in FORMATS} - {""} <= known_parsers("reasoning_parser")
    assert parsers_of(QWEN3) == ("hermes", "qwen3") and parsers_of("<tool_call>") == (
        "hermes",
        "",
    )
    assert parsers_of("<｜tool▁calls▁begin｜>```json") == ("deepseek_v3", "")
    assert parsers_of("```json") == ("", "")
    assert turn_of(ADD, LLAMA).tool_calls == []  # this tokenizer is not Llama's
    with refused("rollout.tool_parser"):
        turn_of(ADD, parser="llama3_json")
    with refused("rollout.tool_parser"):
        turn_of(ADD, parser="nobody's")
