"""Texts by which a session recognises messages that come again: canonical, exact, or as a digest."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


def canonical(*messages: Mapping[str, Any]) -> str:
    """Return what clients keep of the policy's messages: role, text without blanks, and calls with sorted
    arguments.

    Of several, such as an answer in pieces, as of one message. Reasoning is left out: clients may drop it.
    """
    texts = "".join(_text(message.get("content")) for message in messages)
    calls = [
        _call(call) for message in messages for call in message.get("tool_calls") or ()
    ]
    return json.dumps([messages[0].get("role"), texts, calls])


def exact(message: Mapping[str, Any]) -> str:
    """Return all of a message. The order of keys counts in arguments of calls alone, which templates write as
    it is.
    """
    calls = [
        (call.get("id"), call.get("function", call))
        for call in message.get("tool_calls") or ()
    ]
    texts = [
        [name, function.get("name"), function.get("arguments")] for name, function in calls
    ]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return _dump_sorted(others) + json.dumps(texts, default=str)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return "".join(content.split())
    parts = content or () if not isinstance(content, Mapping) else (content,)
    return "".join(
        _text(part)
        if isinstance(part, str)
        else _text(part.get("text")) or _dump_sorted(part)
        for part in parts
    )


def _call(call: Mapping[str, Any]) -> list[str]:
    function = call.get("function") or {}
    # As templates get those that a cut call lacks.
    arguments: Any = function.get("arguments") or {}
    with suppress(ValueError, TypeError, RecursionError):
        arguments = json.loads(arguments)
    return [str(function.get("name")), _dump_sorted(arguments)]


def _dump_sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def digest(prefix: str, text: str) -> str:
    return hashlib.blake2b((prefix + text).encode(), digest_size=16).hexdigest()
