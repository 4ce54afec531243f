"""Forms in which a chat template reads messages, and what it leaves out of them.

    messages of a record --TemplateForms.apply--> for this template --first_hidden--> a message it leaves out

    arguments of calls   a mapping, or JSON in a text: templates write the other form doubly encoded, or raise
    content beside calls a text, or None: some templates show calls only beside None
    thoughts             under one of THOUGHTS, others are left out

Each form is tried once a template, on made-up messages.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from workers.errors import DataError

Messages = list[dict[str, Any]]
Render = Callable[[Messages], str]
"""Raises anything."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates look for a message's thoughts."""
IMAGE_PART = {"type": "image"}
PROBE = "probe"
MAPPING, TEXT, EITHER = "mapping", "text", "either"
ARGUMENTS = {"a": PROBE}
QUESTION: dict[str, Any] = {"role": "user", "content": "question"}
RESULT: dict[str, Any] = {
    "role": "tool",
    "name": "add",
    "tool_call_id": "call00000",
    "content": "result",
}
ROLES = ("system", "user", "assistant", "tool")
FOREIGN_ROLES = {
    "developer": "system",
    "function": "tool",
    "observation": "tool",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
}
"""Other systems' names of roles."""


@dataclass(frozen=True)
class TemplateForms:
    """What a template takes. texts, parts: contents that are texts, and those that are lists of parts.

    arguments: MAPPING, TEXT or EITHER. empty: the content of a message that only calls. thoughts: the names
    that it reads. roles: to rename, such as `developer` where only `system` is shown.
    """

    texts: bool = True
    parts: bool = False
    arguments: str = EITHER
    empty: str | None = ""
    thoughts: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)

    def apply(self, messages: Messages) -> Messages:
        """Convert cleaned messages. Raises DataError, naming the message, for what the template
        cannot take.
        """
        return [
            self._message(message, number)
            for number, message in enumerate(messages, start=1)
        ]

    def _message(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        changed = message | {"role": self.roles.get(message["role"], message["role"])}
        calls = message.get("tool_calls")
        if calls and not message.get("content"):
            changed["content"] = self.empty
        if "content" in changed:
            changed["content"] = self._content(changed["content"], number)
        if calls:
            changed["tool_calls"] = [self._call(call, number) for call in calls]
        return self._with_thoughts(changed)

    def _content(self, content: Any, number: int) -> Any:
        if isinstance(content, list) and not self.parts:
            if IMAGE_PART in content:
                raise DataError(
                    f"message {number} has parts, such as images, and the template shows none"
                )
            return "".join(part["text"] for part in content)
        if isinstance(content, str) and self.parts and not self.texts:
            return [{"type": "text", "text": content}]
        return content

    def _call(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        if "function" not in call:  # some data sets leave out the level between
            call = {"type": "function", "function": call}
        function = call["function"]
        arguments = self._arguments(
            function.get("arguments"), str(function.get("name")), number
        )
        return call | {"function": function | {"arguments": arguments}}

    def _arguments(self, arguments: Any, name: str, number: int) -> Any:
        if arguments is None or arguments == "":
            arguments = {}
        if self.arguments == TEXT and not isinstance(arguments, str):
            return json.dumps(arguments, ensure_ascii=False)
        if self.arguments != MAPPING or isinstance(arguments, Mapping):
            return arguments
        mapping = parse_json(arguments)
        if not isinstance(mapping, dict):
            raise DataError(
                f"message {number} calls {name!r} with arguments that are not a JSON object. Correct them, "
                "as the template takes an object"
            )
        return mapping

    def _with_thoughts(self, message: dict[str, Any]) -> dict[str, Any]:
        names = [name for name in THOUGHTS if message.get(name)]
        if not names or not self.thoughts or set(names) & set(self.thoughts):
            return message
        other_fields = {name: value for name, value in message.items() if name not in names}
        return other_fields | {self.thoughts[0]: message[names[0]]}


def parse_json(value: Any) -> Any:
    """Parse a text that is JSON, and return other values as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def without_nulls(value: Any) -> Any:
    """Drop the keys of mappings that are None, which Arrow adds: one struct has the keys of all rows."""
    if isinstance(value, dict):
        return {
            name: without_nulls(inner) for name, inner in value.items() if inner is not None
        }
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def try_forms(render: Render) -> TemplateForms:
    """Try which forms of messages a template shows."""

    def shows(content: Any) -> bool:
        text = _try_render(render, [{"role": "user", "content": content}])
        return PROBE in text and f"'{PROBE}'" not in text and f'"{PROBE}"' not in text

    contents = TemplateForms(shows(PROBE), shows([{"type": "text", "text": PROBE}]))

    def rendered(*messages: dict[str, Any]) -> str:
        chat = [
            m | {"content": contents._content(m["content"], number)}
            for number, m in enumerate(messages)
        ]
        return _try_render(render, chat)

    arguments, empty = _call_forms(rendered)
    call = _calling(json.dumps({"a": "1"}) if arguments == TEXT else {"a": "1"}, empty)
    turns = call, {"role": "assistant", "content": "answer"}

    def shows_thoughts(name: str) -> bool:
        return any(PROBE in rendered(QUESTION, turn | {name: PROBE}) for turn in turns)

    thoughts = tuple(name for name in THOUGHTS if shows_thoughts(name))
    roles = {}
    visible_roles = {
        role: PROBE in rendered({"role": role, "content": PROBE}, QUESTION)
        for role in ("system", "developer")
    }
    if visible_roles["system"] and not visible_roles["developer"]:
        roles["developer"] = "system"  # OpenAI's newer name
    return TemplateForms(contents.texts, contents.parts, arguments, empty, thoughts, roles)


def _call_forms(rendered: Callable[..., str]) -> tuple[str, str | None]:
    """Return the form of arguments, and the content beside calls."""
    for empty in ("", None):
        for answers in ((), (RESULT,)):  # some templates refuse a call without its answer
            mapping, text = (
                rendered(QUESTION, _calling(arguments, empty), *answers)
                for arguments in (ARGUMENTS, json.dumps(ARGUMENTS))
            )
            if PROBE in mapping and str(ARGUMENTS) not in mapping:
                return EITHER if mapping == text else MAPPING, empty
            if PROBE in text and f'\\"{PROBE}' not in text:
                return TEXT, empty
    return EITHER, ""


def _calling(arguments: Any, content: str | None) -> dict[str, Any]:
    call = {
        "type": "function",
        "id": RESULT["tool_call_id"],
        "function": {"name": "add", "arguments": arguments},
    }
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _try_render(render: Render, messages: Messages) -> str:
    try:
        return render(messages)
    except Exception:  # templates may raise anything
        return ""


def first_hidden(render: Render, messages: Messages) -> tuple[int, str] | None:
    """Return the index of the first message of which `render` leaves out the content or the calls, and which
    of them.

    Each text is replaced by a probe, which nothing else can hold. A template may drop earlier turns' texts
    beside calls as it drops thoughts: such a message is shown when it is the last one.
    """
    probed = [_probe_message(message, number) for number, message in enumerate(messages)]
    text = _try_render(render, probed)
    plain = None
    for number, message in enumerate(messages):
        for part, probe, written in _probes(message, number):
            if probe in text:
                continue
            plain = _try_render(render, messages) if plain is None else plain
            if written and (
                written in plain or json.dumps(written, ensure_ascii=False)[1:-1] in plain
            ):
                continue
            if message["role"] == "assistant" and probe in _try_render(
                render, probed[: number + 1]
            ):
                continue
            return number, part
    return None


CONTENT = "content"


def _probe_message(message: dict[str, Any], number: int) -> dict[str, Any]:
    content = message.get("content")
    changed = dict(message)
    if isinstance(content, list):
        changed["content"] = [
            part | {"text": _probe(number, place)} if _has_text(part) else part
            for place, part in enumerate(content)
        ]
    elif content and content.strip():
        changed["content"] = _probe(number, 0)
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [
            _probe_call(call, number, place) for place, call in enumerate(calls)
        ]
    return changed


def _probe_call(call: dict[str, Any], number: int, place: int) -> dict[str, Any]:
    arguments = {"value": f"called {number}-{place}."}
    if "function" in call:
        return call | {"function": call["function"] | {"arguments": arguments}}
    return call | {"arguments": arguments}


def _has_text(part: Mapping[str, Any]) -> bool:
    return part["type"] == "text" and bool(part["text"].strip())


def _probe(number: int, part: int) -> str:
    return f"shown {number}-{part}."


def _probes(message: dict[str, Any], number: int) -> Iterator[tuple[str, str, str]]:
    """Yield what holds a probe, the probe, and the text in its place."""
    content = message.get("content") or ""
    for place, part in enumerate(
        content if isinstance(content, list) else [{"type": "text", "text": content}]
    ):
        if _has_text(part):
            yield CONTENT, _probe(number, place), part["text"].strip()
    for place, _ in enumerate(message.get("tool_calls") or ()):
        yield f"call {place + 1}", f"called {number}-{place}.", ""


def advice(message: Mapping[str, Any], part: str, roles: Sequence[str] = ROLES) -> str:
    """Return how to mend a message that a template leaves out."""
    role = message["role"]
    if part == CONTENT and message.get("tool_calls"):
        return "Leave its content empty, or set model.chat_template to a template that shows it beside calls"
    if part == "call 1" and message.get("content"):
        return "Leave its content empty, or set model.chat_template to a template that shows both"
    if part != CONTENT:
        return "Set model.chat_template to a template that shows it, or leave it out"
    better = FOREIGN_ROLES.get(role) or next(iter(get_close_matches(role, roles, 1)), "")
    if better and better != role:
        return f"Rename the role to {better!r}"
    return "Move or remove it, or set model.chat_template to a template that shows it there"
