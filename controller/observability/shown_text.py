"""Shorten texts for display, and mask secrets: environment variables, passwords in URLs, known
token formats.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "[hidden]"
TELLING = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.IGNORECASE
)
SHORTEST = 8  # shorter values are switches or numbers instead of secrets
PATTERNS = (
    (re.compile(r"(://[^/\s:@]*:)[^@\s/]+@"), rf"\1{MASK}@"),
    (re.compile(r"\b(?:hf|ghp|gho|glpat|wandb|sk|xox[abp])[_-][A-Za-z0-9_-]{16,}"), MASK),
    (re.compile(r"\bAKIA[0-9A-Z]{16}\b"), MASK),
)
"""(found, replacement): the password of a URL, and tokens by the prefixes of services."""


def redact(value: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """Mask every secret in the texts of `value`, also in lists, tuples and values of mappings."""
    if isinstance(value, str):
        return _mask(value, environment)
    if isinstance(value, Mapping):
        return {key: redact(part, environment) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(part, environment) for part in value]
    return value


def _mask(text: str, environment: Mapping[str, str]) -> str:
    secrets = [
        value
        for name, value in environment.items()
        if TELLING.search(name) and len(value) >= SHORTEST
    ]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    for pattern, replacement in PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def shorten(text: str, longest: int) -> str:
    """Return `text`, or its first `longest` characters and the number of others."""
    rest = len(text) - longest
    return text if rest <= 0 else f"{text[:longest]} ... ({rest:,} more characters)"


def show_prompt(prompt: Any, images: Sequence[str] = ()) -> str:
    """Write a prompt, text or chat messages, as text: a paragraph per message. images: their
    names, in order.
    """
    if isinstance(prompt, str):
        return prompt
    text = "\n\n".join(f"{message['role']}: {message_text(message)}" for message in prompt)
    for name in images:
        text = text.replace("[image]", f"[{name}]", 1)
    return text


def message_text(message: Mapping[str, Any]) -> str:
    """Write a chat message as text: its reasoning, content and tool calls, a line each."""
    content = message.get("content") or ""
    thought = message.get("reasoning")
    parts = [content] if isinstance(content, str) else content
    text = "".join(
        part if isinstance(part, str) else part.get("text") or f"[{part.get('type')}]"
        for part in parts
    )
    functions = [call.get("function") or call for call in message.get("tool_calls") or ()]
    calls = [
        f"{function.get('name', '')}({function.get('arguments')})" for function in functions
    ]
    return "\n".join(
        filter(None, [f"(reasoning) {thought}" if thought else "", text, *calls])
    )


def other_columns(record: Mapping[str, Any], prompt_key: str) -> str:
    """Write the columns of a record besides its prompt, one per line."""
    return "\n".join(
        f"{name}: {value}" for name, value in record.items() if name != prompt_key
    )
