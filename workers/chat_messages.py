"""Chat messages of records and requests: checked, and in one form, whatever library wrote them.

messages, or their JSON in a text --clean_prompt--> role, content: text | parts (text, image), tool_calls, ...
"""

from typing import Any

from workers.errors import DataError
from workers.template_forms import IMAGE_PART, parse_json

IMAGE_PLACES = ("image", "image_url", "url", "path")
"""Names under which parts of messages hold images."""


def clean_prompt(prompt: Any, place: str) -> Any:
    """Check a prompt and drop keys that are None, which Arrow adds. Raises DataError, naming the record
    `place`.

    Chat messages may be JSON in a text.
    """
    prompt = messages_in(prompt)
    if not isinstance(prompt, (str, list)):
        raise DataError(
            f"{place} has a prompt of type {type(prompt).__name__}. A string or chat messages are needed."
        )
    if not prompt or (isinstance(prompt, str) and prompt.isspace()):
        raise DataError(f"{place} has an empty prompt.")
    return (
        prompt
        if isinstance(prompt, str)
        else [_message(message, place) for message in prompt]
    )


def check_not_blank(prompt: Any, place: str) -> None:
    """Raise DataError for cleaned chat messages that hold neither a text nor an image nor a call."""
    if isinstance(prompt, list) and not any(map(_says_something, prompt)):
        raise DataError(f"{place} has an empty prompt: all of its messages are blank.")


def _says_something(message: dict[str, Any]) -> bool:
    content = message.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    return bool(message.get("tool_calls")) or any(
        "text" not in part or part["text"].strip() for part in parts
    )


def messages_in(value: Any) -> Any:
    """Return the chat messages that a text holds as JSON, and other values as they are."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    messages = parse_json(value)
    is_chat = (
        isinstance(messages, list)
        and messages
        and all(isinstance(m, dict) and "role" in m for m in messages)
    )
    return messages if is_chat else value


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        keys = (
            f" with the keys {', '.join(map(repr, message))!s:.80}"
            if isinstance(message, dict)
            else ""
        )
        raise DataError(
            f"{place} has a malformed chat message{keys}. Give it a role and a content."
        )
    fields = {name: value for name, value in message.items() if value is not None}
    if "function_call" in fields:
        fields = _with_calls(fields, place)
    if "tool_calls" in fields:
        fields["tool_calls"] = _calls(fields["tool_calls"], place)
    content = fields.get("content")
    if isinstance(content, list):
        return fields | {"content": [_part(part, place) for part in content]}
    if not isinstance(content, str) and (
        content is not None or not fields.get("tool_calls")
    ):
        raise DataError(
            f"{place} has a chat message of role {message['role']!r} whose content is of type "
            f"{type(content).__name__}. Give it a text, which may be empty."
        )
    return fields


def _with_calls(message: dict[str, Any], place: str) -> dict[str, Any]:
    """Replace `function_call`, OpenAI's older form of a call, by `tool_calls`."""
    function = parse_json(message["function_call"])
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or message.get("tool_calls")
    ):
        raise DataError(
            f"{place} has a message with function_call={message['function_call']!r:.80}. Give a name and "
            "arguments, without tool_calls beside it."
        )
    fields = {name: value for name, value in message.items() if name != "function_call"}
    return fields | {"tool_calls": [{"type": "function", "function": function}]}


def _calls(value: Any, place: str) -> list[dict[str, Any]]:
    calls = parse_json(value)
    functions = [
        call.get("function", call) if isinstance(call, dict) else call
        for call in calls or ()
    ]
    if not isinstance(calls, list) or not all(
        isinstance(function, dict) for function in functions
    ):
        raise DataError(
            f"{place} has a message with malformed tool_calls. Give a list of calls, each with a function."
        )
    return calls


def _part(part: Any, place: str) -> dict[str, Any]:
    part = {"type": "text", "text": part} if isinstance(part, str) else part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind in ("image", "image_url"):
        image = next(
            (part[name] for name in IMAGE_PLACES if part.get(name) is not None), None
        )
        image = image.get("url") if isinstance(image, dict) and "url" in image else image
        return IMAGE_PART if image is None else IMAGE_PART | {"image": image}
    if kind != "text" or not isinstance(part.get("text"), str):
        raise DataError(
            f"{place} has a chat message with a part of type {kind!r}. Only parts of types 'text' and "
            "'image' are read."
        )
    return {"type": "text", "text": part["text"]}
