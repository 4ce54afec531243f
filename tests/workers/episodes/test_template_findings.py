"""Findings about the stock templates of TRL, asserted against the templates' own rendering."""

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from tests.workers.rollout.stock_templates import NAMES, SPECIAL, source
from workers.chat_templates import variables_of
from workers.episodes.template_findings import (
    APPENDS,
    CALLING,
    REASONED,
    REFUSES,
    REWRITES,
    TOOL,
    TURNS,
    Following,
    template_findings,
)
from workers.rendering import Messages, Options
from workers.template_forms import try_forms

EMPTY_THOUGHTS = re.compile(r"<think>\s*</think>\s*")
Render = Callable[[Messages, bool, Options], str]


def render_of(text: str) -> Render:
    template = _compile_jinja_template(text)
    return lambda messages, begins, options: str(
        template.render(
            messages=messages, add_generation_prompt=begins, **SPECIAL | options
        )
    )


def stock(name: str) -> tuple[Render, tuple[str, ...]]:
    text = source(name)
    render = render_of(text)
    forms = try_forms(lambda messages: render(messages, False, {}))
    return (
        lambda messages, begins, options: render(forms.apply(messages), begins, options),
        tuple(sorted(variables_of(text).arguments)),
    )


def forms_of(turn: str, calls: int) -> list[dict[str, Any]]:
    found = []
    for arguments in ({"a": "ANSWER"}, '{"a": "ANSWER"}') if turn in CALLING else (None,):
        function = {"name": "add", "arguments": arguments}
        asked = [
            {"type": "function", "id": f"call{n:05}", "function": function}
            for n in range(calls)
        ]
        message = {"role": "assistant", "content": ""} | (
            {"tool_calls": asked} if arguments else {"content": "ANSWER"}
        )
        content = message["content"]
        if turn in REASONED:
            found += [
                message | {key: "THOUGHT"}
                for key in ("reasoning_content", "thinking", "reasoning")
            ]
            found.append(message | {"content": f"<think>\nTHOUGHT\n</think>\n\n{content}"})
        else:
            found.append(message)
    return found


def check(render: Render, case: Following, options: Options) -> None:
    """Compare a case with what the template renders."""
    prompt, calls = (
        [{"role": "user", "content": "QUESTION"}],
        2 if case.role == "tools" else 1,
    )
    follow = [
        {"role": "tool", "name": "add", "tool_call_id": f"call{n:05}", "content": f"R{n}"}
        for n in range(calls)
    ]
    follow = [{"role": "user", "content": "R0"}] if case.role == "user" else follow
    wanted = {"ANSWER"} | ({"THOUGHT"} if case.turn in REASONED else set())
    read, whole, shows_results = render(prompt, True, options), [], False
    for message in forms_of(case.turn, calls):
        try:
            before = render([*prompt, message], False, options)
            after = render([*prompt, message, *follow], True, options)
        except Exception:
            continue
        shows = all(one["content"] in after for one in follow)
        shows_results |= shows
        if shows and all(word in before for word in wanted):
            whole.append((before, after))
    assert (case.outcome == REFUSES) == (not shows_results)
    if not whole:
        assert case.outcome != APPENDS
        assert case.change
        return
    before, after = whole[0]
    said, _, tail = before.rpartition("ANSWER")
    again, _, following = after.rpartition("ANSWER")
    same = said == again or (
        case.turn not in REASONED and EMPTY_THOUGHTS.sub("", said) == again
    )
    ends = [
        (re.findall(r"<(?!/)[^<>\s]+>|</s>", text) or [""])[0] for text in (tail, following)
    ]
    kept = not ends[0] or ends[0] == ends[1]
    assert (case.outcome == APPENDS) == (same and kept and after.startswith(read)), (
        before,
        after,
    )
    for removed in (
        re.findall(r"removes ('[^']*')", case.change) if before.startswith(read) else []
    ):
        assert ast.literal_eval(removed) in before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("thinking", [None, False])
def test_findings_are_what_the_template_renders(name: str, thinking: bool | None) -> None:
    render, arguments = stock(name)
    if thinking is not None and "enable_thinking" not in arguments:
        return
    options = {} if thinking is None else {"enable_thinking": thinking}
    found = template_findings(render, arguments, options, "<bos>")
    assert [(case.role, case.turn) for case in found.cases] == [
        (r, turn) for r in TURNS for turn in TURNS[r]
    ]
    for case in found.cases:
        tools = {"tools": [TOOL]} if case.turn in CALLING and "tools" in arguments else {}
        check(render, case, options | tools)
    prompt = render([{"role": "user", "content": "QUESTION"}], True, options)
    assert prompt.endswith(found.begin)
    assert prompt.startswith("<bos>" * found.bos) and not prompt.startswith(
        "<bos>" * (found.bos + 1)
    )
    assert found.ends


def test_41_templates_are_tried() -> None:
    assert len(NAMES) == 41
    refusing = {name for name in NAMES if template_findings(*stock(name), {}).refuses}
    assert refusing == {
        "cohere",
        "cohere2",
        "gemma",
        "gemma3",
        "llama3_1",
        "llama3_2",
        "llava_next",
        "phi3",
        "phi3_5",
    }


def test_a_template_that_drops_the_end_of_a_turn_or_doubles_the_beginning_is_found_out() -> (
    None
):
    render = render_of(
        "{{ bos_token * 2 }}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{{ eos_token if loop.last and m.role == 'assistant' }}{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt }}"
    )
    found = template_findings(render, (), {}, "<bos>")
    assert (found.bos, found.cases[0].outcome, found.cases[0].change) == (
        2,
        "rewrites",
        "removes '<eos>'",
    )


MOVING = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}{{ bos_token }}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ system ~ '\n\n' if system and loop.last }}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""As Mistral's, which moves the system message into the last user's turn."""


def test_a_template_that_moves_a_system_message_rewrites_a_conversation_with_one() -> None:
    found = template_findings(render_of(MOVING), (), {}, "<bos>")
    assert found.cases[0].outcome == APPENDS and found.system_matters
    assert (found.system.outcome, found.system.role) == (REWRITES, "system")
    assert "RULE" in found.system.change
    silent = template_findings(
        render_of(MOVING.replace("system and loop.last", "false")), (), {}, "<bos>"
    )
    assert silent.system.outcome == REFUSES
    still = template_findings(
        render_of(MOVING.replace("loop.last", "loop.index0 == 1")), (), {}, "<bos>"
    )
    assert still.system.outcome == APPENDS and not still.system_matters


@pytest.mark.parametrize("name", NAMES)
def test_a_system_message_is_shown_or_refused_as_the_template_renders_it(name: str) -> None:
    render, arguments = stock(name)
    found = template_findings(render, arguments, {}, "<bos>").system
    messages = [
        {"role": "system", "content": "RULE"},
        {"role": "user", "content": "QUESTION"},
    ]
    answer = {"role": "assistant", "content": "ANSWER"}
    try:
        read = render(messages, True, {})
        before = render([*messages, answer], False, {})
        after = render([*messages, answer, {"role": "user", "content": "R0"}], True, {})
    except Exception:
        assert found.outcome == REFUSES
        return
    assert (found.outcome == REFUSES) == ("RULE" not in read)
    if found.outcome == APPENDS:
        assert (
            after.startswith(read)
            and before.partition("RULE")[0] == after.partition("RULE")[0]
        )
