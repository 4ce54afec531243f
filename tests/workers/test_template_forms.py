"""Messages in the forms of data files, rendered by every stock chat template: nothing doubly encoded, nothing
lost.
"""

import json
from typing import Any

import pytest

from tests.workers.rollout.stock_templates import NAMES, tokenizer
from workers.chat_messages import clean_prompt
from workers.episodes.template_findings import TOOL
from workers.errors import DataError
from workers.rendering import Renderer
from workers.template_forms import without_nulls

WITHOUT_CALLS = {
    *("cohere", "cohere2", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next"),
    *("phi3", "phi3_5", "qwen2_5_vl", "smolvlm"),
}
QUESTION = {"role": "user", "content": "question"}


def calling(arguments: Any, **keys: Any) -> list[dict[str, Any]]:
    call = {
        "type": "function",
        "id": "call00000",
        "function": {"name": "add", "arguments": arguments},
    }
    return [QUESTION, {"role": "assistant", "tool_calls": [call]} | keys]


def rendered(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    renderer = Renderer(tokenizer(name))
    messages = clean_prompt(messages, "record 1")
    renderer.check_shown(messages, "record 1", **options)
    return renderer.text(messages, "record 1", **options)


@pytest.mark.parametrize("content", ["", None])
@pytest.mark.parametrize("name", sorted({*NAMES} - WITHOUT_CALLS))
def test_arguments_are_a_mapping_or_json_and_are_rendered_alike(
    name: str, content: str | None
) -> None:
    arguments = {"a": "four"}
    mapping = rendered(name, calling(arguments, content=content))
    assert "four" in mapping and str(arguments) not in mapping and '\\"four' not in mapping
    assert rendered(name, calling(json.dumps(arguments), content=content)) == mapping


@pytest.mark.parametrize("name", sorted(WITHOUT_CALLS))
def test_calls_that_a_template_leaves_out_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"record 1"):
        rendered(name, calling({"a": "four"}, content=""))


@pytest.mark.parametrize("role", ["developer", "function", "human", "gpt", "asistant"])
@pytest.mark.parametrize("name", NAMES)
def test_a_role_is_shown_or_refused_by_name(name: str, role: str) -> None:
    messages = [{"role": role, "content": "Be brief."}, QUESTION]
    try:
        assert "Be brief." in rendered(name, messages)
    except DataError as error:
        assert "record 1" in str(error)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", ["qwen3", "gptoss", "glm4moe", "lfm2_2_5"])
def test_thoughts_are_rendered_under_each_name(name: str, key: str) -> None:
    assert "I add." in rendered(
        name, [QUESTION, {"role": "assistant", "content": "four", key: "I add."}]
    )


def test_arguments_that_are_no_json_are_refused_by_record() -> None:
    with pytest.raises(DataError, match=r"record 1 .*message 2 calls 'add'"):
        rendered("qwen2_5", calling("a=4", content=""), tools=[TOOL])


def test_nulls_of_arrow_are_dropped_from_calls() -> None:
    assert without_nulls([{"arguments": {"a": 1, "b": None, "c": [None]}}]) == [
        {"arguments": {"a": 1, "c": [None]}}
    ]


@pytest.mark.parametrize("prompt", [" ", "\n\t "])
def test_a_prompt_of_white_space_is_empty(prompt: str) -> None:
    with pytest.raises(DataError, match=r"record 1 has an empty prompt"):
        clean_prompt(prompt, "record 1")


def test_messages_as_json_text_are_messages() -> None:
    assert clean_prompt(json.dumps([QUESTION]), "record 1") == [QUESTION]
    assert clean_prompt("[1, 2] is a list", "record 1") == "[1, 2] is a list"


def test_keys_that_no_template_reads_are_named_once() -> None:
    renderer = Renderer(tokenizer("qwen2_5"))
    for number in (1, 2):
        renderer.check_shown([QUESTION | {"mood": "calm"}], f"record {number}")
    (warning,) = renderer.unread.values()
    assert "record 1" in warning and "'mood'" in warning
