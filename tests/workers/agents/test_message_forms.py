"""Histories whose messages come in other forms than before: they extend a turn only if the prompt says the
same.
"""

from contextlib import suppress
from itertools import product
from typing import Any

import pytest

from tests.workers.rollout import stock_templates
from tests.workers.rollout.sessions import response
from workers.agents.prompt_renderer import PromptRenderer
from workers.agents.session import Session
from workers.agents.session_requests import OpenSession
from workers.errors import DataError
from workers.rendering import Renderer

WRITTEN = "{% for m in messages %}[{{ m.role }}]{% for c in m.tool_calls or [] %}{{ c.function }}{% endfor %}"
PARTS = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
END = "{% endfor %}{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
TEMPLATES = {
    "parts one behind the other": f"{WRITTEN}{PARTS}{{{{ p.text }}}}{END}",
    "a line for each part": f"{WRITTEN}{PARTS}{{{{ p.text }}}}\n{END}",
    "trimmed parts": f"{WRITTEN}{PARTS}{{{{ p.text | trim }}}}{END}",
    "the first part": f"{WRITTEN}{PARTS}{{% if loop.first %}}{{{{ p.text }}}}{{% endif %}}{END}",
    "users' parts joined, others numbered": (
        f"{WRITTEN}{PARTS}{{% if m.role != 'user' %}}{{{{ loop.index }}}}.{{% endif %}}{{{{ p.text }}}}{END}"
    ),
    "the name of a tool": f"{WRITTEN}{{{{ m.name }}}}{PARTS}{{{{ p.text }}}}{END}",
    "texts alone": f"{WRITTEN}{{{{ m.content + eos_token }}}}{{% endfor %}}",
}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


CONTENTS = (
    "1 1",
    "1  1",
    parts("1 1"),
    parts("1 1", ""),
    parts("", "1 1"),
    parts("1", " 1"),
    parts("1 ", "1"),
)
CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1}},
}
USER, SAID = {"role": "user", "content": "5"}, {"role": "assistant", "content": "7"}
BEFORE = {
    "system": [{"role": "system"}, USER],
    "user": [{"role": "user"}],
    "tool": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add"},
    ],
    "assistant": [USER, {"role": "assistant"}, USER],
}


def history(role: str, content: Any, **keys: Any) -> list[dict[str, Any]]:
    return [
        m | keys | {"content": content} if m["role"] == role and "content" not in m else m
        for m in BEFORE[role]
    ]


def renderer_of(template: str) -> Renderer:
    if template not in TEMPLATES:
        return Renderer(stock_templates.tokenizer(template))
    tokenizer = stock_templates.tokenizer(stock_templates.NAMES[0])
    renderer = Renderer(
        type(tokenizer)(
            tokenizer_object=tokenizer.backend_tokenizer, **stock_templates.SPECIAL
        )
    )
    renderer.tokenizer.chat_template = TEMPLATES[template]
    return renderer


def extends(
    renderer: Renderer, first: list[dict[str, Any]], second: list[dict[str, Any]]
) -> bool:
    """Whether a request whose history begins with `second` continues a turn that answered `first`."""
    prompts, session = PromptRenderer(renderer), Session("s", max_turns=9)
    opened = OpenSession(session, None, 0, {}, 0)  # type: ignore[arg-type]
    asked, prompt = prompts.read(opened, prompts.messages(first), {})
    node = session.add(asked, prompt.ids, response([5, 6]), number=0, message=SAID)
    return (
        prompts.read(opened, prompts.messages([*second, SAID, USER]), {})[0].parent is node
    )


@pytest.mark.drawn(8, always=[*TEMPLATES, "gemma3"])
@pytest.mark.parametrize("template", [*TEMPLATES, *stock_templates.NAMES])
def test_a_history_extends_a_turn_only_if_its_messages_are_rendered_alike(
    template: str,
) -> None:
    renderer, tried, matched = renderer_of(template), 0, dict[str, int]()
    for role, first, second in product(BEFORE, (CONTENTS[0], CONTENTS[5]), CONTENTS):
        try:
            before, after = history(role, first), history(role, second)
            rendered = [
                renderer.text(messages, "", add_generation_prompt=True)
                for messages in (before, after)
            ]
            found = extends(renderer, before, after)
        except DataError:  # a role that the template does not know
            continue
        tried += 1
        matched[role] = matched.get(role, 0) + found
        assert not found or rendered[0] == rendered[1], (role, first, second)
        assert found or first != second, (role, first)
    assert tried
    joined = template in ("parts one behind the other", "texts alone", "the name of a tool")
    assert not joined or set(matched.values()) == {2 * 6}  # all but "1  1"


@pytest.mark.parametrize(
    ("template", "matches"), [("the name of a tool", False), ("a line for each part", True)]
)
def test_keys_of_a_message_count_if_the_template_reads_them(
    template: str, matches: bool
) -> None:
    renderer = renderer_of(template)
    others = history("tool", "3", name="max", tool_call_id="another")
    assert extends(renderer, history("tool", "3"), others) is matches


@pytest.mark.drawn(12, always=["qwen2_5", "qwen3", "gptoss", "glm4moe"])
@pytest.mark.parametrize("template", stock_templates.NAMES)
def test_thoughts_of_a_client_reach_the_prompt_under_each_name_or_are_named(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Some templates show them beside calls alone, which names nothing: they read the key."""
    rendered = dict[str, list[str]]()
    for key in ("reasoning_content", "reasoning", "thinking"):
        prompts, caplog.records[:] = PromptRenderer(renderer_of(template)), []
        rendered[key] = []
        for said in ({"content": "four"}, {"content": "", "tool_calls": [CALL]}):
            opened = OpenSession(Session("s", max_turns=9), None, 0, {}, 0)  # type: ignore[arg-type]
            answer = (
                [{"role": "tool", "tool_call_id": CALL["id"], "content": "3"}]
                if "tool_calls" in said
                else []
            )
            messages = [USER, {"role": "assistant", key: "I add."} | said, *answer]
            with suppress(DataError):  # a template without calls
                ids = prompts.read(opened, prompts.messages(messages), {})[1].ids
                rendered[key].append(
                    stock_templates.tokenizer(template).decode(ids.tolist())
                )
        named = [record.getMessage() for record in caplog.records]
        is_named = any("never reads the key" in words for words in named)
        assert any("I add." in text for text in rendered[key]) is not is_named
    assert rendered["reasoning"] == rendered["reasoning_content"] == rendered["thinking"]
